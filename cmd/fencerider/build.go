package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/starintel/fencerider/config"
	"github.com/starintel/fencerider/couch"
	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/fence/policy"
	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/leaseclient/valkeystore"
	"github.com/starintel/fencerider/proxy"
	"github.com/starintel/fencerider/rabbit"
)

// newLogger writes JSON lines.
func newLogger(level string, w io.Writer) (*zap.Logger, error) {
	l, err := zapcore.ParseLevel(level)
	if err != nil {
		return nil, fmt.Errorf("read log level: %w", err)
	}
	enc := zap.NewProductionEncoderConfig()
	enc.TimeKey, enc.MessageKey, enc.LevelKey = "time", "msg", "level"
	enc.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	enc.EncodeDuration = zapcore.StringDurationEncoder
	return zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(enc), zapcore.Lock(zapcore.AddSync(w)), l)), nil
}

// openStore builds the lease store.
func openStore(c *config.Config) (*valkeystore.Store, error) {
	o := valkeystore.Options{
		URL: c.ValkeyURL.Get().String(), Username: c.ValkeyUsername, Password: c.ValkeyPassword.Reveal(), Namespace: c.Namespace,
		Policy: leaseclient.TimePolicy{
			MinTTL: c.TTLMin, DefaultTTL: c.TTLDefault, MaxTTL: c.TTLMax,
			DefaultMaxLifetime: c.MaxLifetimeDefault, MaxLifetimeCeiling: c.MaxLifetimeCeiling, RetryWindow: c.RetryWindow,
		},
		Bound: c.ArrivalBound, MaxEntries: c.LogMaxEntries, MaxBytes: c.LogMaxBytes, AllowVolatile: c.AllowVolatile,
	}
	if c.ValkeyCAFile != "" {
		pem, err := os.ReadFile(c.ValkeyCAFile)
		if err != nil {
			return nil, &usageError{fmt.Errorf("read the lease store's certificates: %w", err)}
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, &usageError{fmt.Errorf("%s holds no certificate", c.ValkeyCAFile)}
		}
		o.TLS = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	s, err := valkeystore.Open(o)
	if err != nil {
		return nil, &usageError{err}
	}
	return s, nil
}

// withPassword puts a password from a setting of its own into a URL.
func withPassword(u *url.URL, password string) *url.URL {
	if u == nil || password == "" {
		return u
	}
	out := *u
	name := ""
	if u.User != nil {
		name = u.User.Username()
	}
	out.User = url.UserPassword(name, password)
	return &out
}

// reach is a readiness check that an address accepts connections.
func reach(name, addr string) proxy.Check {
	return proxy.Check{Name: name, Probe: func(ctx context.Context) error {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
		if err != nil {
			return err
		}
		return c.Close()
	}}
}

// hostPort is a URL's address with the scheme's usual port.
func hostPort(u *url.URL, ports map[string]string) string {
	port := u.Port()
	if port == "" {
		port = ports[u.Scheme]
	}
	return net.JoinHostPort(u.Hostname(), port)
}

// reachCouch is a readiness check that CouchDB answers.
func reachCouch(u *url.URL) proxy.Check {
	bare := *u
	bare.User = nil
	cl := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	return proxy.Check{Name: "couchdb", Probe: func(ctx context.Context) error {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, bare.JoinPath("/_up").String(), nil)
		if err != nil {
			return err
		}
		res, err := cl.Do(r)
		if err != nil {
			return err
		}
		_ = res.Body.Close()
		if res.StatusCode >= http.StatusInternalServerError {
			return fmt.Errorf("CouchDB answered %d", res.StatusCode)
		}
		return nil
	}}
}

// run builds every room and runs the sidecar.
func run(ctx context.Context, c *config.Config, logs io.Writer) error {
	log, err := newLogger(c.LogLevel, logs)
	if err != nil {
		return err
	}
	defer func() { _ = log.Sync() }()
	var pol *policy.Policy
	if c.PolicyFile != "" {
		if pol, err = readPolicy(c.PolicyFile, c.OperationClasses); err != nil {
			return err
		}
	}
	policyNow := func() *policy.Policy { return pol }
	store, err := openStore(c)
	if err != nil {
		return err
	}
	defer store.Close()

	metrics := proxy.NewMetrics(version())
	table := proxy.NewTable()
	effectors := make(map[leaseclient.Kind]fence.Effector)
	checks := []proxy.Check{{Name: "lease_store", Probe: store.Ready}}
	couchURL, amqpURL := withPassword(c.CouchDBURL.Get(), c.CouchDBPassword.Reveal()), withPassword(c.AMQPURL.Get(), c.AMQPPassword.Reveal())
	if couchURL != nil {
		e, err := couch.NewEffector(couch.EffectorOptions{Upstream: couchURL, StampMember: func() string { return pol.StampMember() }, Logger: log})
		if err != nil {
			return err
		}
		defer e.Close()
		effectors[leaseclient.KindDocument] = e
		checks = append(checks, reachCouch(couchURL))
	}
	if amqpURL != nil {
		e, err := rabbit.NewEffector(rabbit.EffectorOptions{Upstream: amqpURL, Logger: log})
		if err != nil {
			return err
		}
		effectors[leaseclient.KindPublish] = e
		checks = append(checks, reach("rabbitmq", hostPort(amqpURL, map[string]string{"amqp": "5672", "amqps": "5671"})))
	}
	gate, err := fence.New(fence.Options{
		Log: store, Effectors: effectors, Bound: c.ArrivalBound, SweepInterval: c.SweepInterval,
		Events: metrics.FenceEvents(func(what string, err error) {
			log.Warn("background work failed, it is tried again", zap.String("what", what), zap.Error(err))
		}),
	})
	if err != nil {
		return err
	}
	o := proxy.Options{
		Store: store, Gate: gate, Table: table, Logger: log, Metrics: metrics, Version: version(), Checks: checks, Unprotected: pol.Unprotected(),
		CouchListen: c.CouchListen, AMQPListen: c.AMQPListen, AdminListen: c.AdminListen, SocketDir: c.SocketDir, Classes: c.OperationClasses,
		Deadline: c.Deadline, DeadlineCeiling: c.DeadlineCeiling, Drain: c.DrainTimeout, Shutdown: c.ShutdownTimeout,
	}
	if o.AdminListen == "off" {
		o.AdminListen = ""
	}
	mode, err := strconv.ParseUint(c.SocketMode, 8, 9)
	if err != nil {
		return &usageError{err}
	}
	o.SocketMode = os.FileMode(mode)
	if couchURL != nil {
		h, err := couch.New(couch.Options{
			Upstream: couchURL, Policy: policyNow, Leases: table, Gate: gate, Logger: log, MaxBody: c.CouchMaxBody, MaxBulkDocs: c.CouchMaxBulkDocs,
			MaxEffect: c.EffectMax, MaxWrites: c.CouchMaxWrites, Timeout: c.WriteTimeout,
			OnVerdict: func(code leaseclient.Code) { metrics.Verdict("couch", code) },
		})
		if err != nil {
			return err
		}
		defer h.Close()
		o.Couch = h
	}
	if amqpURL != nil {
		srv, err := rabbit.New(rabbit.Options{
			Upstream: amqpURL, Policy: policyNow, Leases: table, Gate: gate, Logger: log, MaxConnections: c.AMQPMaxConnections,
			MaxMessage: c.AMQPMaxMessage, MaxEffect: c.EffectMax, Timeout: c.WriteTimeout,
			OnVerdict: func(code leaseclient.Code) { metrics.Verdict("rabbit", code) },
		})
		if err != nil {
			return err
		}
		o.Rabbit = srv
	}
	if err := identities(c, &o); err != nil {
		return err
	}
	s, err := proxy.New(o)
	if err != nil {
		return err
	}
	return s.Run(ctx)
}

// identities fills in who the sidecar is and which lease it starts with.
func identities(c *config.Config, o *proxy.Options) error {
	or := func(v, prefix string) string {
		if v == "" {
			return leaseclient.NewID(prefix)
		}
		return v
	}
	o.Owner = leaseclient.Owner{
		PrincipalID: c.PrincipalID, ClientID: c.ClientID, CredentialID: c.CredentialID, InstanceID: or(c.InstanceID, "instance"),
	}
	o.Identity = leaseclient.Identity{
		TenantID: c.LeaseTenantID, ProgramID: c.LeaseProgramID, TargetNamespace: c.LeaseTargetNamespace, TargetID: c.LeaseTargetID,
		ActorName: c.LeaseActorName, WorkflowName: c.LeaseWorkflowName, OperationClass: c.LeaseOperationClass,
	}
	if c.LeaseTargetID == "" {
		return nil
	}
	id, err := o.Identity.Normalize()
	if err != nil {
		return &usageError{fmt.Errorf("the lease of the environment: %w", err)}
	}
	o.Identity.TargetID = ""
	req := leaseclient.AcquireRequest{
		Call: leaseclient.Call{RequestID: "request_check", Deadline: time.Now().Add(time.Minute)}, Identity: id, Owner: o.Owner,
		TTL: c.LeaseTTL, MaxLifetime: c.LeaseMaxLifetime,
		ExecutionID: or(c.LeaseExecutionID, "execution"), JobID: or(c.LeaseJobID, "job"), TraceID: or(c.LeaseTraceID, "trace"),
	}
	if err := req.Validate(); err != nil {
		return &usageError{fmt.Errorf("the lease of the environment: %w", err)}
	}
	o.EnvLease = &proxy.EnvLease{Request: req, Again: c.LeaseAgain, Wait: c.LeaseWait}
	return nil
}

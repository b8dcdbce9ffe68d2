package config

import (
	"encoding/json"
	"net/url"
	"time"

	"go.uber.org/zap/zapcore"
)

// Prefix starts every variable.
const Prefix = "FENCERIDER_"

// Secret is a text that never shows itself. Reveal is the only way to it.
type Secret struct{ text string }

// hidden is what is shown in its place.
const hidden = "(hidden)"

// Reveal returns the secret.
func (s Secret) Reveal() string { return s.text }

// String hides the secret.
func (s Secret) String() string {
	if s.text == "" {
		return ""
	}
	return hidden
}

// GoString hides the secret.
func (s Secret) GoString() string { return s.String() }

// MarshalJSON hides the secret.
func (s Secret) MarshalJSON() ([]byte, error) { return json.Marshal(s.String()) }

// MarshalLogObject hides the secret from zap.
func (s Secret) MarshalLogObject(zapcore.ObjectEncoder) error { return nil }

// UnmarshalText takes the secret from a variable.
func (s *Secret) UnmarshalText(b []byte) error {
	s.text = string(b)
	return nil
}

// URL is an address whose password is hidden.
type URL struct{ u *url.URL }

// Get returns the address; nil when it is not set.
func (u URL) Get() *url.URL { return u.u }

// String shows the address without its password.
func (u URL) String() string {
	if u.u == nil {
		return ""
	}
	return u.u.Redacted()
}

// GoString hides the password.
func (u URL) GoString() string { return u.String() }

// MarshalJSON hides the password.
func (u URL) MarshalJSON() ([]byte, error) { return json.Marshal(u.String()) }

// UnmarshalText reads an address.
func (u *URL) UnmarshalText(b []byte) error {
	v, err := url.Parse(string(b))
	if err != nil || v.Scheme == "" {
		// The library's text would repeat the address, and with it a password.
		return errURL
	}
	u.u = v
	return nil
}

// Config is the whole configuration. The tags name the variable (without its
// prefix), the default, the meaning with its unit, and the range.
type Config struct {
	ValkeyURL      URL    `env:"VALKEY_URL" doc:"Lease store: valkey://host:port, valkeys:// for TLS, unix://. One server: failover to a replica can hand a fencing token out twice, which is not prevented yet" need:"yes"`
	ValkeyUsername string `env:"VALKEY_USERNAME" doc:"User at the lease store, over the one in the URL"`
	ValkeyPassword Secret `env:"VALKEY_PASSWORD" doc:"Password at the lease store, over the one in the URL" file:"yes"`
	ValkeyCAFile   string `env:"VALKEY_CA_FILE" doc:"Certificates that sign the lease store's, PEM"`
	Namespace      string `env:"NAMESPACE" default:"fencerider" doc:"Separates deployments on one lease store"`

	CouchDBURL      URL    `env:"COUCHDB_URL" doc:"CouchDB; its credentials are used for settlement only. Without it the CouchDB proxy is off"`
	CouchDBPassword Secret `env:"COUCHDB_PASSWORD" doc:"Password for settlement, over the one in the URL" file:"yes"`
	AMQPURL         URL    `env:"AMQP_URL" doc:"RabbitMQ, amqp:// or amqps://; its credentials are used for settlement only. Without it the RabbitMQ proxy is off"`
	AMQPPassword    Secret `env:"AMQP_PASSWORD" doc:"Password for settlement, over the one in the URL" file:"yes"`

	CouchListen string `env:"COUCH_LISTEN" default:"127.0.0.1:5984" doc:"Where workers reach CouchDB"`
	AMQPListen  string `env:"AMQP_LISTEN" default:"127.0.0.1:5672" doc:"Where workers reach RabbitMQ"`
	AdminListen string `env:"ADMIN_LISTEN" default:"127.0.0.1:9464" doc:"Health and metrics; \"off\" for none"`
	SocketDir   string `env:"SOCKET_DIR" default:"/run/fencerider" doc:"Directory of control.sock and events.sock; made with mode 0700 when it is not there"`
	SocketMode  string `env:"SOCKET_MODE" default:"0600" doc:"File mode of both sockets, octal. Only this user and root get in, whatever the mode"`

	PolicyFile       string   `env:"POLICY_FILE" doc:"Which lease a write needs, YAML. Without it every write needs the sidecar's single lease"`
	OperationClasses []string `env:"OPERATION_CLASSES" default:"default" doc:"Closed list of operation classes, separated by commas"`

	PrincipalID  string `env:"PRINCIPAL_ID" default:"fencerider" doc:"Owner of the leases of this sidecar"`
	ClientID     string `env:"CLIENT_ID" default:"sidecar" doc:"Client software named in leases"`
	CredentialID string `env:"CREDENTIAL_ID" default:"local" doc:"Credential named in leases, never its secret"`
	InstanceID   string `env:"INSTANCE_ID" doc:"This run of the sidecar; made up at each start when it is not set"`

	LeaseTenantID        string        `env:"LEASE_TENANT_ID" doc:"Identity: tenant. The components given here are also the defaults of requests on the control socket"`
	LeaseProgramID       string        `env:"LEASE_PROGRAM_ID" doc:"Identity: program"`
	LeaseTargetNamespace string        `env:"LEASE_TARGET_NAMESPACE" doc:"Identity: namespace of the target"`
	LeaseTargetID        string        `env:"LEASE_TARGET_ID" doc:"Identity: target. When it is set, the lease is acquired at the start and kept"`
	LeaseActorName       string        `env:"LEASE_ACTOR_NAME" doc:"Identity: actor"`
	LeaseWorkflowName    string        `env:"LEASE_WORKFLOW_NAME" default:"default" doc:"Identity: workflow"`
	LeaseOperationClass  string        `env:"LEASE_OPERATION_CLASS" default:"default" doc:"Identity: operation class"`
	LeaseExecutionID     string        `env:"LEASE_EXECUTION_ID" doc:"Execution named in the lease and in stamps; made up when it is not set"`
	LeaseJobID           string        `env:"LEASE_JOB_ID" doc:"Job named in the lease; made up when it is not set"`
	LeaseTraceID         string        `env:"LEASE_TRACE_ID" doc:"Trace named in the lease and in stamps; made up when it is not set"`
	LeaseTTL             time.Duration `env:"LEASE_TTL" default:"0s" doc:"TTL of the lease acquired at the start; 0 means TTL_DEFAULT" min:"0s" max:"24h"`
	LeaseMaxLifetime     time.Duration `env:"LEASE_MAX_LIFETIME" default:"0s" doc:"Its maximum lifetime; 0 means MAX_LIFETIME_DEFAULT" min:"0s" max:"720h"`
	LeaseWait            time.Duration `env:"LEASE_WAIT" default:"0s" doc:"How long the start may wait for it; 0 means for ever" min:"0s" max:"720h"`
	LeaseAgain           bool          `env:"LEASE_AGAIN" default:"false" doc:"Acquire it anew, with a new token, after it was lost. Only for workers that stop at lease_lost and start over at lease_acquired: to the store, what such a worker still had in hand is then written under the new lease"`

	TTLMin             time.Duration `env:"TTL_MIN" default:"1s" doc:"A TTL must be longer than this" min:"0s" max:"1h"`
	TTLDefault         time.Duration `env:"TTL_DEFAULT" default:"30s" doc:"TTL where a request names none" min:"1ms" max:"1h"`
	TTLMax             time.Duration `env:"TTL_MAX" default:"300s" doc:"Longest TTL" min:"1ms" max:"24h"`
	MaxLifetimeDefault time.Duration `env:"MAX_LIFETIME_DEFAULT" default:"1h" doc:"Longest life of a lease, renewals included, where a request names none" min:"1s" max:"720h"`
	MaxLifetimeCeiling time.Duration `env:"MAX_LIFETIME_CEILING" default:"24h" doc:"Longest life that a request may ask for" min:"1s" max:"720h"`
	RetryWindow        time.Duration `env:"RETRY_WINDOW" default:"24h" doc:"How long past a lease's longest life a repeated request finds its first result" min:"1m" max:"720h"`
	Deadline           time.Duration `env:"DEADLINE_DEFAULT" default:"5s" doc:"Deadline of an operation that names none" min:"100ms" max:"1m"`
	DeadlineCeiling    time.Duration `env:"DEADLINE_CEILING" default:"60s" doc:"Longest deadline of an operation" min:"100ms" max:"10m"`

	ArrivalBound  time.Duration `env:"ARRIVAL_BOUND" default:"5s" doc:"How long after its acceptance a write may be sent. The same for all sidecars of a namespace" min:"100ms" max:"60s"`
	WriteTimeout  time.Duration `env:"WRITE_TIMEOUT" default:"15s" doc:"How long a write may wait for its turn, a predecessor's settlement included" min:"100ms" max:"10m"`
	SweepInterval time.Duration `env:"SWEEP_INTERVAL" default:"5s" doc:"Pause between two rounds of the sweeper" min:"100ms" max:"1h"`
	LogMaxEntries int           `env:"LOG_MAX_ENTRIES" default:"10000" doc:"Commits of one lock that may be in flight" min:"1" max:"1000000"`
	LogMaxBytes   int64         `env:"LOG_MAX_BYTES" default:"67108864" doc:"Bytes of one lock's commit log" min:"1024" max:"1073741824"`
	EffectMax     int           `env:"EFFECT_MAX_BYTES" default:"1048576" doc:"Largest message, and largest document that the commit log carries" min:"1024" max:"16777216"`

	CouchMaxBody       int64 `env:"COUCH_MAX_BODY_BYTES" default:"8388608" doc:"Largest body of a fenced document write, inflated" min:"1024" max:"67108864"`
	CouchMaxBulkDocs   int   `env:"COUCH_MAX_BULK_DOCS" default:"1000" doc:"Documents of one _bulk_docs" min:"1" max:"100000"`
	CouchMaxWrites     int   `env:"COUCH_MAX_WRITES" default:"64" doc:"Fenced writes in memory at once" min:"1" max:"10000"`
	AMQPMaxConnections int   `env:"AMQP_MAX_CONNECTIONS" default:"1000" doc:"Connections of workers to RabbitMQ" min:"1" max:"100000"`
	AMQPMaxMessage     int   `env:"AMQP_MAX_MESSAGE_BYTES" default:"16777216" doc:"Largest message that needs no lease" min:"1024" max:"134217728"`

	DrainTimeout    time.Duration `env:"DRAIN_TIMEOUT" default:"10s" doc:"How long accepted writes may take at the end" min:"100ms" max:"10m"`
	ShutdownTimeout time.Duration `env:"SHUTDOWN_TIMEOUT" default:"20s" doc:"How long the whole end may take" min:"100ms" max:"10m"`
	LogLevel        string        `env:"LOG_LEVEL" default:"info" doc:"debug, info, warn or error"`

	AllowVolatile bool `env:"ALLOW_VOLATILE_STORE" default:"false" doc:"For development only: accept a lease store that may forget or evict. Every guarantee ends with it"`
}

package proxy

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/starintel/fencerider/leaseclient"
)

// probeTime bounds one check of readiness.
const probeTime = 3 * time.Second

// checkResult is one part of readiness as it is shown: a name and a word, never
// an address.
type checkResult struct {
	Name  string `json:"name"`
	OK    bool   `json:"ok"`
	State string `json:"state"`
}

// check runs every check side by side.
func (s *Sidecar) check(ctx context.Context) ([]checkResult, bool) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	out := make([]checkResult, len(s.opts.Checks), len(s.opts.Checks)+2)
	var wg sync.WaitGroup
	for i, c := range s.opts.Checks {
		wg.Go(func() {
			out[i] = checkResult{Name: c.Name, OK: true, State: "ok"}
			if err := c.Probe(ctx); err != nil {
				e := leaseclient.AsError(err)
				word := string(e.Code)
				if e.Code == leaseclient.CodeInternal {
					word = "unreachable"
				}
				out[i] = checkResult{Name: c.Name, State: word}
			}
		})
	}
	wg.Wait()
	if s.opts.EnvLease != nil {
		r := checkResult{Name: "lease", State: "not held"}
		if _, ok := s.opts.Table.Held(s.opts.EnvLease.Request.Identity); ok {
			for _, k := range s.opts.Table.held() {
				if k.Lease().Identity == s.opts.EnvLease.Request.Identity {
					r = checkResult{Name: "lease", OK: true, State: "held"}
				}
			}
		}
		out = append(out, r)
	}
	if s.ending() {
		out = append(out, checkResult{Name: "lifecycle", State: "shutting down"})
	}
	ready := true
	for _, r := range out {
		ready = ready && r.OK
	}
	return out, ready
}

// adminHandler serves health and metrics.
func (s *Sidecar) adminHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) {
		s.answer(w, http.StatusOK, map[string]string{"status": "alive"})
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		checks, ready := s.check(r.Context())
		code := http.StatusOK
		if !ready {
			code = http.StatusServiceUnavailable
		}
		s.answer(w, code, map[string]any{"ready": ready, "checks": checks})
	})
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		s.answer(w, http.StatusOK, map[string]string{"version": s.opts.Version})
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.opts.Metrics.Registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	return mux
}

package proxy

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/leaseclient"
)

// Metrics are all metrics of a sidecar, in a registry of their own. The values
// of their labels are closed sets.
type Metrics struct {
	Registry *prometheus.Registry

	renewals   *prometheus.CounterVec
	losses     *prometheus.CounterVec
	verdicts   *prometheus.CounterVec
	begin      prometheus.Histogram
	ended      *prometheus.CounterVec
	settled    *prometheus.CounterVec
	background prometheus.Counter
	operations *prometheus.CounterVec
}

// NewMetrics registers everything.
func NewMetrics(version string) *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "fencerider", Name: name, Help: help}, labels)
	}
	m := &Metrics{
		Registry: prometheus.NewRegistry(),
		renewals: counter("lease_renewals_total", "Renewals of leases, by result.", "result"),
		losses:   counter("lease_losses_total", "Leases that were lost, by reason.", "reason"),
		verdicts: counter("verdicts_total", "Writes that the sidecar decided, by adapter and code.", "adapter", "code"),
		begin: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "fencerider", Name: "begin_seconds", Help: "Time from asking for a commit until the store's answer.",
			Buckets: []float64{.0005, .001, .002, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}),
		ended:   counter("commits_ended_total", "Commits that left the log by their own sidecar, by outcome.", "outcome"),
		settled: counter("commits_settled_total", "Commits that were finished by settlement, by kind, mode and outcome.", "kind", "mode", "outcome"),
		background: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "fencerider", Name: "background_failures_total", Help: "Failures of background work; it is tried again.",
		}),
		operations: counter("operations_total", "Operations on the control socket, by name and code.", "operation", "code"),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Namespace: "fencerider", Name: "build_info", Help: "The version that runs.", ConstLabels: prometheus.Labels{"version": version},
	})
	build.Set(1)
	m.Registry.MustRegister(m.renewals, m.losses, m.verdicts, m.begin, m.ended, m.settled, m.background, m.operations, build,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	for _, r := range leaseclient.LossReasons() {
		m.losses.WithLabelValues(string(r))
	}
	return m
}

// watchTable adds what is read from the table at every scrape.
func (m *Metrics) watchTable(t *Table, open func() int) {
	gauge := func(name, help string, f func() float64) {
		m.Registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "fencerider", Name: name, Help: help}, f))
	}
	gauge("leases_held", "Leases that this sidecar holds.", func() float64 { return float64(len(t.held())) })
	gauge("lease_remaining_seconds", "The shortest time that a held lease still has; zero without one.", func() float64 {
		least := time.Duration(-1)
		for _, k := range t.held() {
			if r := k.Remaining(); least < 0 || r < least {
				least = r
			}
		}
		return max(0, least.Seconds())
	})
	gauge("commits_open", "Accepted commits that are not finished yet.", func() float64 { return float64(open()) })
}

// Verdict counts a decided write; an empty code is an accepted one.
func (m *Metrics) Verdict(adapter string, code leaseclient.Code) {
	if code == "" {
		code = "accepted"
	}
	m.verdicts.WithLabelValues(adapter, string(code)).Inc()
}

// FenceEvents are the hooks for a coordinator. failed is told what background
// work could not do.
func (m *Metrics) FenceEvents(failed func(what string, err error)) fence.Events {
	return fence.Events{
		Begun: func(_ int, _ leaseclient.Code, took time.Duration) { m.begin.Observe(took.Seconds()) },
		Ended: func(o leaseclient.Outcome) { m.ended.WithLabelValues(string(o)).Inc() },
		Settled: func(e leaseclient.Entry, mode leaseclient.ClaimMode, o leaseclient.Outcome) {
			m.settled.WithLabelValues(string(e.Kind), string(mode), string(o)).Inc()
		},
		Failed: func(what string, err error) {
			m.background.Inc()
			failed(what, err)
		},
	}
}

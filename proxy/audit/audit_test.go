package audit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/starintel/fencerider/leaseclient"
)

// accepted is an ordinary event.
func accepted() Event {
	return Event{EventType: TypeAcquire, Code: leaseclient.CodeAcquired, PrincipalClass: ClassLocal, RequestID: "request_1"}
}

// newLog returns a log on sinks, and what it shows.
func newLog(t *testing.T, now func() time.Time, sinks ...Sink) (*Log, *observer.ObservedLogs) {
	t.Helper()
	core, logs := observer.New(zap.InfoLevel)
	l := New(Options{Logger: zap.New(core), Sinks: sinks, Now: now})
	t.Cleanup(func() { _ = l.Close() })
	return l, logs
}

// lines reads the events of a file.
func lines(t *testing.T, path string) []Event {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var out []Event
	for line := range strings.Lines(string(b)) {
		if strings.TrimSpace(line) == "" {
			continue
		}
		var e Event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			continue // a line that a crash cut off
		}
		out = append(out, e)
	}
	return out
}

func TestEventsAreCompletedFromTheTable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	s, err := OpenFile(FileOptions{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	l, _ := newLog(t, nil, s)
	for _, info := range leaseclient.Codes() {
		if err := l.RecordDurably(t.Context(), Event{EventType: TypeRenew, Code: info.Code}); err != nil {
			t.Fatal(err)
		}
	}
	got := lines(t, path)
	if len(got) != len(leaseclient.Codes()) {
		t.Fatalf("%d events", len(got))
	}
	for i, info := range leaseclient.Codes() {
		e := got[i]
		if e.Code != info.Code || e.Class != info.Audit || e.Retryable != info.Retryable || e.CorrelationID == "" || e.DecisionID == "" ||
			e.BackendHealth == "" || e.DeadlineClass != DeadlineNone || e.PrincipalClass != ClassSystem || e.TimeSource != TimeOfServer || e.At == 0 {
			t.Errorf("%s: %+v", info.Code, e)
		}
	}
	if err := l.RecordDurably(t.Context(), Event{EventType: "other", Code: leaseclient.CodeAcquired}); err == nil {
		t.Error("an unknown type is recorded")
	}
	if err := l.RecordDurably(t.Context(), Event{EventType: TypeRenew, Code: "other"}); err == nil {
		t.Error("an unknown code is recorded")
	}
	fi, err := os.Stat(path)
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v %v", fi.Mode(), err)
	}
}

func TestFloodsAreCountedInTheLogAndWholeInTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	s, err := OpenFile(FileOptions{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1_700_000_000, 0)
	l, logs := newLog(t, func() time.Time { return now }, s)
	const n = 1000
	for range n {
		l.Record(accepted())
	}
	for range 20 {
		l.Record(Event{EventType: TypeRevoke, Code: leaseclient.CodeRevoked})
	}
	if got := logs.FilterMessage("audit").Len(); got != 10+20 {
		t.Errorf("%d events shown", got)
	}
	now = now.Add(time.Minute)
	l.Record(accepted())
	counted := logs.FilterMessage("audit events of one kind were counted, not shown").All()
	if len(counted) != 1 || counted[0].ContextMap()["count"] != int64(n-10) {
		t.Errorf("%v", counted)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if got := len(lines(t, path)); got != n+21 {
		t.Errorf("the file has %d events", got)
	}
}

func TestFileIsRotatedAndNothingIsLost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	s, err := OpenFile(FileOptions{Path: path, MaxBytes: 4096, Keep: 50})
	if err != nil {
		t.Fatal(err)
	}
	l, _ := newLog(t, nil, s)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 20 {
				e := accepted()
				e.RequestID = fmt.Sprintf("request_%d_%d", w, i)
				if err := l.RecordDurably(t.Context(), e); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	files, err := filepath.Glob(path + "*")
	if err != nil || len(files) < 5 {
		t.Fatalf("%v %v", files, err)
	}
	seen := map[string]bool{}
	for _, f := range files {
		fi, err := os.Stat(f)
		if err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", f, fi.Mode(), err)
		}
		for _, e := range lines(t, f) {
			seen[e.RequestID] = true
		}
	}
	if len(seen) != 160 {
		t.Errorf("%d of 160 events are there", len(seen))
	}
}

func TestLineThatACrashCutOffIsClosed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := os.WriteFile(path, []byte(`{"event_type":"target_le`), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := OpenFile(FileOptions{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	l, _ := newLog(t, nil, s)
	if err := l.RecordDurably(t.Context(), accepted()); err != nil {
		t.Fatal(err)
	}
	if got := lines(t, path); len(got) != 1 || got[0].RequestID != "request_1" {
		t.Errorf("%+v", got)
	}
}

func TestUnsafeFileIsRefused(t *testing.T) {
	dir := t.TempDir()
	open := filepath.Join(dir, "open")
	if err := os.WriteFile(open, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{open, dir, filepath.Join(dir, "none", "x")} {
		if _, err := OpenFile(FileOptions{Path: p}); err == nil {
			t.Errorf("%s: accepted", p)
		}
	}
}

func TestFullDiskIsAnAlertAndMends(t *testing.T) {
	// /dev/full takes no byte. It is no regular file, so the sink is pointed at
	// it only after it was opened.
	path := filepath.Join(t.TempDir(), "audit.log")
	s, err := OpenFile(FileOptions{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	failed := 0
	core, _ := observer.New(zap.InfoLevel)
	l := New(Options{Logger: zap.New(core), Sinks: []Sink{s}, OnFailed: func(string, error) {
		mu.Lock()
		defer mu.Unlock()
		failed++
	}})
	defer func() { _ = l.Close() }()
	s.(*fileSink).f.Close()
	s.(*fileSink).f = full
	if err := l.RecordDurably(t.Context(), accepted()); err == nil {
		t.Fatal("an event was kept on a full disk")
	}
	mu.Lock()
	if failed != 1 {
		t.Errorf("%d alerts", failed)
	}
	mu.Unlock()
	// There is room again.
	if err := l.Healthy(t.Context()); err != nil {
		t.Errorf("still broken: %v", err)
	}
	if err := l.RecordDurably(t.Context(), accepted()); err != nil {
		t.Error(err)
	}
	if got := len(lines(t, path)); got != 1 {
		t.Errorf("%d events", got)
	}
}

// stuck is a sink that waits.
type stuck struct{ release chan struct{} }

func (s stuck) Name() string         { return "stuck" }
func (s stuck) Write([][]byte) error { <-s.release; return nil }
func (s stuck) Close() error         { return nil }

func TestSlowSinkHoldsNobodyUpAndIsBounded(t *testing.T) {
	s := stuck{make(chan struct{})}
	var mu sync.Mutex
	var first error
	core, _ := observer.New(zap.ErrorLevel)
	l := New(Options{Logger: zap.New(core), Sinks: []Sink{s}, OnFailed: func(_ string, err error) {
		mu.Lock()
		defer mu.Unlock()
		if first == nil {
			first = err
		}
	}})
	for range maxBacklog + 2*maxBatch + 1 {
		l.Record(accepted())
	}
	mu.Lock()
	if first == nil || !strings.Contains(first.Error(), "wait already") {
		t.Errorf("%v", first)
	}
	mu.Unlock()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.RecordDurably(ctx, accepted()); err == nil {
		t.Error("kept")
	}
	close(s.release)
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := l.RecordDurably(t.Context(), accepted()); err == nil {
		t.Error("kept after the end")
	}
}

func TestDatabaseGetsEveryEvent(t *testing.T) {
	raw := os.Getenv("FENCERIDER_TEST_COUCHDB_URL")
	if raw == "" {
		t.Fatal("FENCERIDER_TEST_COUCHDB_URL is not set: this test needs a real CouchDB API, `make test` starts one")
	}
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	db := strings.ReplaceAll(leaseclient.NewID("audit"), "_", "-")
	l, _ := newLog(t, nil, OpenCouch(CouchOptions{URL: u, Database: db}))
	for i := range 250 {
		e := accepted()
		e.RequestID = fmt.Sprint("request_", i)
		l.Record(e)
	}
	if err := l.RecordDurably(t.Context(), Event{EventType: TypeRevoke, Code: leaseclient.CodeRevoked, Reason: "it is so"}); err != nil {
		t.Fatal(err)
	}
	res, err := http.Get(raw + "/" + db + "/_all_docs?include_docs=true")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	var all struct {
		Rows []struct{ Doc Event }
	}
	if err := json.Unmarshal(b, &all); err != nil || len(all.Rows) != 251 {
		t.Fatalf("%d documents, %v: %.300s", len(all.Rows), err, b)
	}
	seen := map[string]bool{}
	for _, r := range all.Rows {
		seen[r.Doc.RequestID] = true
	}
	if len(seen) != 251 || all.Rows[0].Doc.RequestID != "request_0" {
		t.Errorf("%d different events, the first is %q", len(seen), all.Rows[0].Doc.RequestID)
	}
}

func TestDatabaseOutOfReachIsAnError(t *testing.T) {
	u := &url.URL{Scheme: "http", Host: "127.0.0.1:1", User: url.UserPassword("u", "hunter2")}
	l, logs := newLog(t, nil, OpenCouch(CouchOptions{URL: u, Database: "audit"}))
	err := l.RecordDurably(t.Context(), accepted())
	if err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("%v", err)
	}
	if err := l.Healthy(t.Context()); err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	for _, e := range logs.All() {
		if strings.Contains(fmt.Sprint(e.ContextMap()), "hunter2") {
			t.Errorf("the log shows a password: %v", e.ContextMap())
		}
	}
}

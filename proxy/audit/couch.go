package audit

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// CouchOptions configure a database of events.
type CouchOptions struct {
	// URL is the server's, with credentials.
	URL *url.URL
	// Database is made when it is not there.
	Database string
	// Timeout bounds one write; 5 s.
	Timeout time.Duration
}

// couchSink writes events to a database, a batch in one request.
type couchSink struct {
	opts   CouchOptions
	client *http.Client
}

// OpenCouch opens a database of events. It does not connect.
func OpenCouch(o CouchOptions) Sink {
	if o.Timeout <= 0 {
		o.Timeout = 5 * time.Second
	}
	return &couchSink{opts: o, client: &http.Client{Transport: &http.Transport{MaxConnsPerHost: 2, IdleConnTimeout: time.Minute}}}
}

// Name implements [Sink].
func (s *couchSink) Name() string { return "couchdb" }

// Write implements [Sink]. Ids are made here and begin with the time, so that the
// database is in order. Writing nothing makes sure that the database is there.
func (s *couchSink) Write(lines [][]byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), s.opts.Timeout)
	defer cancel()
	if len(lines) == 0 {
		return s.create(ctx)
	}
	docs := make([]json.RawMessage, 0, len(lines))
	for _, l := range lines {
		id := fmt.Sprintf("%016x-%s", time.Now().UnixNano(), strings.ToLower(rand.Text()))
		docs = append(docs, json.RawMessage(`{"_id":"`+id+`",`+string(l[1:])))
	}
	body, err := json.Marshal(map[string]any{"docs": docs})
	if err != nil {
		return fmt.Errorf("encode audit events: %w", err)
	}
	status, answer, err := s.send(ctx, http.MethodPost, "_bulk_docs", body)
	if err == nil && status == http.StatusNotFound {
		if err = s.create(ctx); err == nil {
			status, answer, err = s.send(ctx, http.MethodPost, "_bulk_docs", body)
		}
	}
	if err != nil {
		return err
	}
	if status != http.StatusCreated && status != http.StatusAccepted {
		return fmt.Errorf("audit database answered %d", status)
	}
	var rows []struct {
		Rev   string `json:"rev"`
		Error string `json:"error"`
	}
	if err := json.Unmarshal(answer, &rows); err != nil || len(rows) != len(docs) {
		return errors.New("audit database answered something else than rows")
	}
	for _, r := range rows {
		if r.Rev == "" {
			return fmt.Errorf("audit database refused an event: %.64q", r.Error)
		}
	}
	return nil
}

// create makes the database.
func (s *couchSink) create(ctx context.Context) error {
	status, _, err := s.send(ctx, http.MethodPut, "", nil)
	if err != nil {
		return err
	}
	if status >= 300 && status != http.StatusPreconditionFailed {
		return fmt.Errorf("audit database cannot be made: the server answered %d", status)
	}
	return nil
}

// send makes one request.
func (s *couchSink) send(ctx context.Context, method, path string, body []byte) (int, []byte, error) {
	u := s.opts.URL.JoinPath(s.opts.Database, path)
	user := u.User
	u.User = nil
	r, err := http.NewRequestWithContext(ctx, method, u.String(), bytes.NewReader(body))
	if err != nil {
		return 0, nil, errors.New("audit database: cannot make a request")
	}
	if user != nil {
		password, _ := user.Password()
		r.SetBasicAuth(user.Username(), password)
	}
	r.Header.Set("Content-Type", "application/json")
	res, err := s.client.Do(r)
	if err != nil {
		return 0, nil, fmt.Errorf("write to the audit database: %w", err)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(res.Body, 4<<20))
	if err != nil {
		return 0, nil, fmt.Errorf("read from the audit database: %w", err)
	}
	return res.StatusCode, b, nil
}

// Close implements [Sink].
func (s *couchSink) Close() error {
	s.client.CloseIdleConnections()
	return nil
}

package couch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/starintel/fencerider/couch/jsonedit"
	"github.com/starintel/fencerider/fence"
)

// newTransport returns the way to CouchDB. It never inflates answers (that would
// change attachments that are stored compressed) and has no time limit on the
// answer (a feed has none); writes bring their own.
func newTransport() *http.Transport {
	return &http.Transport{
		DialContext:           (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		TLSHandshakeTimeout:   5 * time.Second,
		DisableCompression:    true,
		MaxIdleConnsPerHost:   64,
		IdleConnTimeout:       30 * time.Second,
		ExpectContinueTimeout: time.Second,
	}
}

// credentialHeaders are what CouchDB authenticates a request by.
var credentialHeaders = []string{"Authorization", "Cookie", "X-Auth-Couchdb-Username", "X-Auth-Couchdb-Roles", "X-Auth-Couchdb-Token"}

// droppedHeaders never reach CouchDB: those that make it act on another request
// than the one that was judged, those that are the sidecar's, and those that
// belong to one connection.
var droppedHeaders = []string{
	"X-Http-Method-Override", "X-Forwarded-Host", "X-Couchdb-Requested-Path", "X-Couchdb-Vhost-Path",
	"Fencerider-Lease", "Fencerider-Code", "Idempotency-Key", "X-Idempotency-Key",
	"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// forwardHeaders copies what may reach CouchDB.
func forwardHeaders(in http.Header) http.Header {
	out := in.Clone()
	for _, v := range in.Values("Connection") {
		for name := range strings.SplitSeq(v, ",") {
			out.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range droppedHeaders {
		out.Del(name)
	}
	for name := range out {
		if strings.HasPrefix(name, "X-Fence-") || strings.HasPrefix(name, "X-Fencerider-") {
			out.Del(name)
		}
	}
	if _, ok := out["User-Agent"]; !ok {
		// Without this Go would add one of its own.
		out["User-Agent"] = nil
	}
	return out
}

// client talks to CouchDB in one direction, with given credentials.
type client struct {
	base      *url.URL
	transport http.RoundTripper
}

// url makes the address of a target below the upstream.
func (c *client) url(t target) *url.URL {
	u := *c.base
	u.User, u.Fragment = nil, ""
	path := strings.TrimSuffix(c.base.EscapedPath(), "/") + t.path()
	u.Opaque = ""
	u.RawPath = path
	u.Path, _ = url.PathUnescape(path)
	u.RawQuery = t.rawQuery()
	return &u
}

// docTarget is the target of a document.
func docTarget(database, id string, query ...param) target {
	t := target{segments: []string{database}, query: query}
	if name, ok := strings.CutPrefix(id, "_design/"); ok {
		t.segments = append(t.segments, "_design", name)
	} else {
		t.segments = append(t.segments, id)
	}
	return t
}

// request makes a request that the transport will not repeat by itself: its body
// cannot be rewound.
func (c *client) request(ctx context.Context, method string, t target, header http.Header, body io.Reader, length int64) *http.Request {
	r := (&http.Request{
		Method: method, URL: c.url(t), Header: header, Host: c.base.Host,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
	}).WithContext(ctx)
	if body != nil {
		r.Body, r.ContentLength = io.NopCloser(body), length
	}
	return r
}

// maxLook bounds a document that is read for a look.
const maxLook = 64 << 20

// errUpstream is an answer that is neither the document nor its absence; it
// carries the answer so that the worker gets it as it is.
type errUpstream struct {
	status int
	header http.Header
	body   []byte
}

func (e *errUpstream) Error() string { return fmt.Sprintf("CouchDB answered %d", e.status) }

// errNoDatabase says that the database is not there.
var errNoDatabase = errors.New("database does not exist")

// document is a document as it stands: its winner.
type document struct {
	// exists is false when the id was never used.
	exists  bool
	deleted bool
	rev     revision
	// body is the whole document; nil when only the stamp was needed and known.
	body []byte
	// stamp is nil when the winner carries none.
	stamp *fence.Stamp
}

// get reads a bounded answer.
func (c *client) get(ctx context.Context, method string, t target, header http.Header) (*answered, error) {
	res, err := c.transport.RoundTrip(c.request(ctx, method, t, header, nil, 0))
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxLook+1))
	if err != nil {
		return nil, err
	}
	if len(body) > maxLook {
		return nil, fmt.Errorf("document is longer than %d bytes", maxLook)
	}
	return &answered{res.StatusCode, res.Header, body}, nil
}

// look reads the current winner of a document, deleted or not. withBody asks for
// the body even where the stamp is known.
func (c *client) look(ctx context.Context, cache *stampCache, database, id, member string, header http.Header, withBody bool) (*document, error) {
	header = header.Clone()
	header.Set("Accept", "application/json")
	if !withBody {
		res, err := c.get(ctx, http.MethodHead, docTarget(database, id), header)
		if err != nil {
			return nil, err
		}
		if res.status == http.StatusOK {
			rev, ok := parseRevision(strings.Trim(res.header.Get("Etag"), `"`))
			if stamp, known := cache.get(database, id, rev); ok && known {
				return &document{exists: true, rev: rev, stamp: stamp}, nil
			}
		}
	}
	res, err := c.get(ctx, http.MethodGet, docTarget(database, id), header)
	if err != nil {
		return nil, err
	}
	switch res.status {
	case http.StatusOK:
		d, err := readDocument(res.body, member)
		if err != nil {
			return nil, err
		}
		cache.put(database, id, d.rev, d.stamp)
		return d, nil
	case http.StatusNotFound:
		return c.lookDeleted(ctx, database, id, member, header, res.body)
	}
	return nil, &errUpstream{res.status, res.header, res.body}
}

// noDatabase recognizes CouchDB's answer for a database that is not there.
func noDatabase(body []byte) bool {
	v, err := jsonedit.Parse(body, jsonedit.Limits{})
	if err != nil {
		return false
	}
	m, _ := v.Member("reason")
	reason, _ := m.Text()
	return strings.Contains(reason, "Database does not exist") || reason == "no_db_file"
}

// lookDeleted reads the tombstone that wins where a plain GET finds nothing.
func (c *client) lookDeleted(ctx context.Context, database, id, member string, header http.Header, notFound []byte) (*document, error) {
	if noDatabase(notFound) {
		return nil, errNoDatabase
	}
	leaves, err := c.leaves(ctx, database, id, member, header)
	if err != nil {
		return nil, err
	}
	winner := &document{}
	for _, d := range leaves {
		if !winner.exists || (winner.deleted && !d.deleted) || (winner.deleted == d.deleted && winner.rev.less(d.rev)) {
			winner = d
		}
	}
	return winner, nil
}

// leaves reads every leaf of a document's revision tree.
func (c *client) leaves(ctx context.Context, database, id, member string, header http.Header) ([]*document, error) {
	res, err := c.get(ctx, http.MethodGet, docTarget(database, id, param{"open_revs", "all"}, param{"revs", "true"}), header)
	if err != nil {
		return nil, err
	}
	switch res.status {
	case http.StatusOK:
	case http.StatusNotFound:
		if noDatabase(res.body) {
			return nil, errNoDatabase
		}
		return nil, nil
	default:
		return nil, &errUpstream{res.status, res.header, res.body}
	}
	v, err := jsonedit.Parse(res.body, jsonedit.Limits{MaxBytes: maxLook})
	if err != nil {
		return nil, fmt.Errorf("read leaves: %w", err)
	}
	var out []*document
	for row := range v.Elements() {
		ok, found := row.Member("ok")
		if !found {
			continue
		}
		d, err := readDocument(ok.Bytes(), member)
		if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

// at reads one revision of a document; nil when it is not kept any more.
func (c *client) at(ctx context.Context, database, id, member string, rev revision, header http.Header) (*document, error) {
	res, err := c.get(ctx, http.MethodGet, docTarget(database, id, param{"rev", rev.String()}), header)
	if err != nil {
		return nil, err
	}
	switch res.status {
	case http.StatusOK:
		return readDocument(res.body, member)
	case http.StatusNotFound:
		return nil, nil
	}
	return nil, &errUpstream{res.status, res.header, res.body}
}

// readDocument takes what matters out of a stored document. A stamp that cannot
// be read is an error: it is not the same as none.
func readDocument(body []byte, member string) (*document, error) {
	o, err := jsonedit.ParseObject(body, jsonedit.Limits{MaxBytes: maxLook})
	if err != nil {
		return nil, fmt.Errorf("read document: %w", err)
	}
	rev, ok := memberRevision(o)
	if !ok || rev.none() {
		return nil, errors.New("read document: it has no revision")
	}
	d := &document{exists: true, rev: rev, body: body}
	if v, found := o.Member("_deleted"); found {
		d.deleted = v.True()
	}
	if v, found := o.Member(member); found {
		s, err := fence.ParseDocument(v.Bytes())
		if err != nil {
			return nil, err
		}
		d.stamp = &s
	}
	return d, nil
}

// ancestors lists the revisions behind a leaf, the latest first, from the
// _revisions that came with it.
func (d *document) ancestors() []revision {
	v, err := jsonedit.Parse(d.body, jsonedit.Limits{MaxBytes: maxLook})
	if err != nil {
		return nil
	}
	ids, _ := v.Lookup("_revisions.ids")
	var out []revision
	gen := d.rev.gen
	for e := range ids.Elements() {
		hash, _ := e.Text()
		if r, ok := parseRevision(revision{gen, hash}.String()); ok && r != d.rev {
			out = append(out, r)
		}
		if gen == 1 {
			break
		}
		gen--
	}
	return out
}

// maxCached bounds the stamps that are remembered.
const maxCached = 4096

// stampCache remembers stamps by revision. A revision's content never changes,
// so an entry is never wrong; the oldest make room. It is safe for concurrent
// use.
type stampCache struct {
	mu    sync.Mutex
	known map[string]*fence.Stamp
	order []string
}

// newStampCache returns an empty cache.
func newStampCache() *stampCache { return &stampCache{known: make(map[string]*fence.Stamp)} }

// cacheKey separates its parts by a byte that none of them holds unescaped.
func cacheKey(database, id string, rev revision) string {
	return encode(database) + "/" + encode(id) + "/" + rev.String()
}

// get returns a stamp, which may be nil, and whether the revision is known.
func (c *stampCache) get(database, id string, rev revision) (*fence.Stamp, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, ok := c.known[cacheKey(database, id, rev)]
	return s, ok
}

// put remembers a stamp.
func (c *stampCache) put(database, id string, rev revision, s *fence.Stamp) {
	if rev.none() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	key := cacheKey(database, id, rev)
	if _, ok := c.known[key]; ok {
		return
	}
	if len(c.order) >= maxCached {
		drop := c.order[:maxCached/4]
		for _, k := range drop {
			delete(c.known, k)
		}
		c.order = slices.Delete(c.order, 0, len(drop))
	}
	c.known[key] = s
	c.order = append(c.order, key)
}

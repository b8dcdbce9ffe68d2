package couch

import (
	"net/http"
	"slices"
	"strings"

	"github.com/starintel/fencerider/fence/policy"
)

// class says what a request can do.
type class uint8

// The classes. The zero class is refused.
const (
	// classUnknown: not in the table, so refused where anything is fenced.
	classUnknown class = iota
	// classRead: cannot write, whatever it carries.
	classRead
	// classPut, classDelete, classCreate and classBulk are document writes that
	// the sidecar can fence.
	classPut
	classDelete
	classCreate
	classBulk
	// classUnfenceable: a document write that is not fenced, with its reason.
	classUnfenceable
	// classEndpoint: writes past the documents, and needs to be opened.
	classEndpoint
)

// judgement is what the table says of a request.
type judgement struct {
	class class
	// database is empty for requests to the server as a whole.
	database string
	// id is the document of classPut and classDelete.
	id string
	// endpoint is what classEndpoint needs opened.
	endpoint policy.Endpoint
	// what names an unfenceable write, in words for the worker.
	what string
}

// overrides are the methods that CouchDB takes from X-HTTP-Method-Override.
var overrides = []string{"GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "CONNECT", "COPY"}

// effectiveMethod is the method that CouchDB acts on. Only a POST is overridden,
// and what stands behind a semicolon is ignored.
func effectiveMethod(r *http.Request) string {
	values := r.Header.Values("X-HTTP-Method-Override")
	if r.Method != http.MethodPost || len(values) == 0 {
		return r.Method
	}
	v, _, _ := strings.Cut(strings.Join(values, ", "), ";")
	if v = strings.TrimSpace(v); slices.Contains(overrides, v) {
		return v
	}
	return r.Method
}

// reading reports whether a method only reads everywhere that reading is meant.
func reading(method string) bool {
	return method == http.MethodGet || method == http.MethodHead
}

// readIf returns a read for the given methods.
func readIf(j judgement, ok bool) judgement {
	if ok {
		j.class = classRead
	}
	return j
}

// needs returns a judgement that asks for an endpoint to be opened.
func needs(j judgement, e policy.Endpoint) judgement {
	j.class, j.endpoint = classEndpoint, e
	return j
}

// unfenceable returns a refused document write.
func unfenceable(j judgement, what string) judgement {
	j.class, j.what = classUnfenceable, what
	return j
}

// systemDatabases begin with an underscore and are databases all the same.
var systemDatabases = []string{"_users", "_replicator", "_global_changes"}

// classify is the table of CouchDB's endpoints.
func classify(method string, t target) judgement {
	s := t.segments
	switch {
	case len(s) == 0:
		return readIf(judgement{}, reading(method) || method == http.MethodOptions)
	case s[0][0] == '_' && !slices.Contains(systemDatabases, s[0]), s[0] == "favicon.ico":
		return classifyServer(method, s)
	}
	j := judgement{database: s[0]}
	if s[0] == "_replicator" || strings.HasSuffix(s[0], "/_replicator") {
		// A document here makes CouchDB itself write somewhere.
		if !reading(method) && !(method == http.MethodPost && len(s) == 2 && slices.Contains(postReads, s[1])) {
			return needs(j, policy.EndpointReplicate)
		}
	}
	if len(s) == 1 {
		switch {
		case reading(method), method == http.MethodOptions:
			j.class = classRead
		case method == http.MethodPost:
			j.class = classCreate
		case method == http.MethodPut:
			return needs(j, policy.EndpointCreateDatabase)
		case method == http.MethodDelete:
			return needs(j, policy.EndpointDeleteDatabase)
		}
		return j
	}
	return classifyDatabase(method, j, s[1:])
}

// classifyServer judges what is addressed to the server as a whole.
func classifyServer(method string, s []string) judgement {
	var j judgement
	switch s[0] {
	case "favicon.ico", "_utils", "_up", "_uuids", "_all_dbs", "_active_tasks", "_membership", "_db_updates", "_scheduler":
		return readIf(j, reading(method))
	case "_dbs_info", "_search_analyze", "_nouveau_analyze":
		return readIf(j, reading(method) || method == http.MethodPost)
	case "_session":
		return readIf(j, reading(method) || method == http.MethodPost || method == http.MethodDelete || method == http.MethodOptions)
	case "_reshard":
		if reading(method) {
			return readIf(j, true)
		}
		return needs(j, policy.EndpointNode)
	case "_replicate":
		return needs(j, policy.EndpointReplicate)
	case "_cluster_setup":
		if reading(method) {
			return readIf(j, true)
		}
		return needs(j, policy.EndpointNode)
	case "_reload_query_servers":
		return needs(j, policy.EndpointNode)
	case "_node":
		if reading(method) && (len(s) == 2 || len(s) >= 3 && slices.Contains(nodeReads, s[2])) {
			return readIf(j, true)
		}
		// Behind this one lies the whole server once more, shards included.
		return needs(j, policy.EndpointNode)
	}
	return j
}

// nodeReads are the parts of /_node/{name} that only read on GET.
var nodeReads = []string{"_stats", "_system", "_prometheus", "_versions", "_smoosh", "_config"}

// postReads are the endpoints of a database whose POST only reads.
var postReads = []string{"_all_docs", "_design_docs", "_local_docs", "_bulk_get", "_revs_diff", "_missing_revs", "_find", "_explain", "_changes", "_ensure_full_commit"}

// classifyDatabase judges what is addressed to a database; s begins behind it.
func classifyDatabase(method string, j judgement, s []string) judgement {
	// "_design%2Fname" is the same document as "_design/name".
	for _, kind := range []string{"_design/", "_local/"} {
		if rest, ok := strings.CutPrefix(s[0], kind); ok && rest != "" {
			s = append([]string{kind[:len(kind)-1], rest}, s[1:]...)
		}
	}
	if s[0][0] != '_' {
		return classifyDocument(method, j, s[0], s[1:])
	}
	get, post := reading(method), method == http.MethodPost
	switch s[0] {
	case "_bulk_docs":
		if post && len(s) == 1 {
			j.class = classBulk
		}
		return j
	case "_all_docs", "_design_docs", "_local_docs":
		return readIf(j, (get || post) && len(s) == 1 || post && len(s) == 2 && s[1] == "queries")
	case "_bulk_get", "_revs_diff", "_missing_revs", "_find", "_explain", "_ensure_full_commit":
		return readIf(j, post && len(s) == 1)
	case "_changes":
		return readIf(j, (get || post || method == http.MethodOptions) && len(s) == 1)
	case "_shards", "_purged_infos", "_auto_purge":
		return readIf(j, get)
	case "_index":
		if get {
			return readIf(j, true)
		}
		return needs(j, policy.EndpointIndex)
	case "_sync_shards":
		return needs(j, policy.EndpointSyncShards)
	case "_compact":
		return needs(j, policy.EndpointCompact)
	case "_view_cleanup", "_search_cleanup", "_nouveau_cleanup":
		return needs(j, policy.EndpointCleanup)
	case "_security":
		if get {
			return readIf(j, true)
		}
		return needs(j, policy.EndpointSecurity)
	case "_revs_limit":
		if get {
			return readIf(j, true)
		}
		return needs(j, policy.EndpointRevsLimit)
	case "_purged_infos_limit":
		if get {
			return readIf(j, true)
		}
		return needs(j, policy.EndpointPurgedLimit)
	case "_purge":
		return needs(j, policy.EndpointPurge)
	case "_partition":
		return classifyPartition(method, j, s[1:])
	case "_design":
		return classifyDesign(method, j, s[1:])
	case "_local":
		if get {
			return readIf(j, true)
		}
		return needs(j, policy.EndpointLocal)
	}
	return readIf(j, get)
}

// classifyPartition judges what lies under a partition; s begins with its name.
func classifyPartition(method string, j judgement, s []string) judgement {
	get, post := reading(method), method == http.MethodPost
	if len(s) >= 2 {
		if rest, ok := strings.CutPrefix(s[1], "_design/"); ok {
			s = append([]string{s[0], "_design", rest}, s[2:]...)
		}
	}
	switch {
	case len(s) < 2:
		return readIf(j, get)
	case s[1] == "_all_docs", s[1] == "_find", s[1] == "_explain":
		return readIf(j, (get || post) && len(s) == 2)
	case s[1] == "_index":
		if get {
			return readIf(j, true)
		}
		return needs(j, policy.EndpointIndex)
	case s[1] == "_design":
		return classifyDesign(method, j, s[2:])
	}
	return readIf(j, get)
}

// classifyDesign judges what lies under a design document; s begins with its
// name.
func classifyDesign(method string, j judgement, s []string) judgement {
	get, post := reading(method), method == http.MethodPost
	if len(s) == 0 {
		return readIf(j, get)
	}
	if len(s) == 1 {
		return classifyDocument(method, j, "_design/"+s[0], nil)
	}
	switch s[1] {
	case "_view", "_search", "_nouveau":
		return readIf(j, get || post)
	case "_search_info", "_search_disk_size", "_nouveau_info", "_info":
		return readIf(j, get)
	case "_show", "_list":
		return readIf(j, get || post)
	case "_update":
		// It writes on every method but GET and HEAD, and there only the
		// function's language stands in the way.
		return needs(j, policy.EndpointUpdate)
	case "_rewrite":
		// A rewrite turns a GET into any request at all.
		return needs(j, policy.EndpointRewrite)
	}
	if get {
		return readIf(j, true)
	}
	return unfenceable(j, "a write of an attachment")
}

// classifyDocument judges what is addressed to a document or, with more
// segments, to its attachment.
func classifyDocument(method string, j judgement, id string, rest []string) judgement {
	j.id = id
	if reading(method) || method == http.MethodOptions {
		return readIf(j, true)
	}
	if len(rest) > 0 {
		return unfenceable(j, "a write of an attachment")
	}
	switch method {
	case http.MethodPut:
		j.class = classPut
	case http.MethodDelete:
		j.class = classDelete
	case "COPY":
		return unfenceable(j, "COPY")
	case http.MethodPost:
		return unfenceable(j, "a form upload")
	}
	return j
}

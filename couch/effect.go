package couch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/starintel/fencerider/couch/jsonedit"
	"github.com/starintel/fencerider/fence"
)

// effectVersion is the version of what the commit log carries.
const effectVersion = 1

// effect is one document write, as it goes into the commit log: everything that
// anybody needs to repeat it, without its stamp.
type effect struct {
	Version  int    `json:"v"`
	Database string `json:"db"`
	ID       string `json:"id"`
	// Rev is the revision that must be the winner; empty for a creation.
	Rev string `json:"rev,omitempty"`
	// Member carries the stamp.
	Member string `json:"member"`
	// Shared: stamps of other locks are no obstacle.
	Shared bool `json:"shared,omitempty"`
	// doc is the document as the worker wrote it.
	doc []byte
}

// encode writes a line of JSON and the document behind it.
func (e effect) encode() ([]byte, error) {
	head, err := json.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("encode effect: %w", err)
	}
	return append(append(head, '\n'), e.doc...), nil
}

// decodeEffect reads what encode wrote.
func decodeEffect(b []byte) (effect, error) {
	head, doc, ok := bytes.Cut(b, []byte{'\n'})
	if !ok {
		return effect{}, errors.New("decode effect: no document")
	}
	var e effect
	dec := json.NewDecoder(bytes.NewReader(head))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&e); err != nil {
		return effect{}, fmt.Errorf("decode effect: %w", err)
	}
	if e.Version != effectVersion || e.Database == "" || e.ID == "" || e.Member == "" {
		return effect{}, errors.New("decode effect: unknown version or a part is missing")
	}
	if e.Rev != "" {
		if _, ok := parseRevision(e.Rev); !ok {
			return effect{}, errors.New("decode effect: malformed revision")
		}
	}
	e.doc = doc
	return e, nil
}

// targetOf is how the log names a document write.
func targetOf(database, id string) string { return encode(database) + "/" + encode(id) }

// parseTargetOf reads what targetOf wrote.
func parseTargetOf(s string) (database, id string, err error) {
	a, b, ok := strings.Cut(s, "/")
	if !ok {
		return "", "", errors.New("parse commit target: no document")
	}
	if database, err = decode(a); err != nil {
		return "", "", fmt.Errorf("parse commit target: %w", err)
	}
	if id, err = decode(b); err != nil {
		return "", "", fmt.Errorf("parse commit target: %w", err)
	}
	return database, id, nil
}

// stamped returns the document with its id, its condition and its stamp, every
// other byte as the worker wrote it.
func (e effect) stamped(s fence.Stamp) ([]byte, error) {
	o, err := jsonedit.ParseObject(e.doc, jsonedit.Limits{MaxBytes: maxLook})
	if err != nil {
		return nil, fmt.Errorf("stamp document: %w", err)
	}
	set := []jsonedit.Member{{Name: "_id", Value: jsonedit.Quote(e.ID)}}
	if e.Rev != "" {
		set = append(set, jsonedit.Member{Name: "_rev", Value: jsonedit.Quote(e.Rev)})
	} else {
		o, err = jsonedit.ParseObject(o.Without("_rev"), jsonedit.Limits{MaxBytes: maxLook})
		if err != nil {
			return nil, fmt.Errorf("stamp document: %w", err)
		}
	}
	set = append(set, jsonedit.Member{Name: e.Member, Value: s.Document()})
	return o.With(set...)
}

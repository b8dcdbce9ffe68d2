package leaseclient

import (
	"errors"
	"strings"
	"testing"
)

func TestMetadataIsBoundedAndHoldsNoSecrets(t *testing.T) {
	nest := func(n int) any {
		var v any = "x"
		for range n {
			v = map[string]any{"a": v}
		}
		return v
	}
	many := map[string]any{}
	for i := range MaxMetadataKeys + 1 {
		many[strings.Repeat("k", i+1)] = i
	}
	for name, m := range map[string]map[string]any{
		"key password":    {"Password": "x"},
		"key token":       {"access_token": "x"},
		"key api key":     {"api-key": "x"},
		"nested key":      {"a": map[string]any{"client_secret": "x"}},
		"key in a list":   {"a": []any{map[string]any{"cookie": "x"}}},
		"bearer":          {"note": "Authorization is Bearer abcdefgh12345678"},
		"basic":           {"note": "basic dXNlcjpwYXNz"},
		"own key":         {"note": "star_sk_v1_key1_abcdef"},
		"private key":     {"note": "-----BEGIN RSA PRIVATE KEY-----"},
		"signed token":    {"note": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.sig"},
		"cloud key":       {"note": "AKIAABCDEFGHIJKLMNOP"},
		"url":             {"note": "amqp://guest:guest@host/"},
		"url, no user":    {"note": "redis://:pass@host"},
		"in a list":       {"note": []any{"ok", "https://u:p@h/"}},
		"empty key":       {"": 1},
		"control in key":  {"a\nb": 1},
		"not utf-8":       {"a": "\xff"},
		"too deep":        {"a": nest(MaxMetadataDepth)},
		"too many":        many,
		"too long":        {"a": strings.Repeat("x", MaxMetadataBytes)},
		"not JSON":        {"a": make(chan int)},
		"long key":        {strings.Repeat("k", MaxIdentifierBytes+1): 1},
		"not even number": {"a": struct{}{}},
	} {
		if s, err := EncodeMetadata(m); err == nil {
			t.Errorf("%s: accepted as %s", name, s)
		} else if f, ok := errors.AsType[*InvalidError](err); !ok || f.Field != "metadata" {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, m := range map[string]map[string]any{
		"nothing": nil,
		"plain":   {"note": "é <x> & y", "n": 1.5, "list": []any{true, nil}, "tokens_used": 7, "url": "https://host:8080/a@b"},
		"depth":   {"a": nest(MaxMetadataDepth - 1)},
	} {
		if _, err := EncodeMetadata(m); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestIdentifiersAreBounded(t *testing.T) {
	for name, v := range map[string]string{
		"empty": "", "long": strings.Repeat("a", MaxIdentifierBytes+1), "path": "a..b", "slash first": "/a", "control": "a\x00",
		"space": "a b", "quote": `a"b`, "multi-byte": "é", "pattern": "a*",
	} {
		if err := ValidateIdentifier("x", v); err == nil {
			t.Errorf("%s: accepted", name)
		} else if v != "" && strings.Contains(err.Error(), v) {
			t.Errorf("%s: the error repeats the value", name)
		}
	}
	if err := ValidateIdentifier("x", strings.Repeat("a", MaxIdentifierBytes)); err != nil {
		t.Errorf("at the limit: %v", err)
	}
}

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// exec runs a command as a person would.
func exec(t *testing.T, environ []string, args ...string) (int, string, string) {
	t.Helper()
	var out, errs bytes.Buffer
	code := execute(t.Context(), args, environ, &out, &errs)
	return code, out.String(), errs.String()
}

func TestUsage(t *testing.T) {
	for _, tc := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--help"}, exitOK, "run"},
		{[]string{"version"}, exitOK, "fencerider "},
		{[]string{"config", "--table"}, exitOK, "FENCERIDER_VALKEY_URL"},
		{[]string{"config", "--example"}, exitOK, "#FENCERIDER_VALKEY_URL="},
		{[]string{"run", "--nonsense"}, exitUsage, "nonsense"},
		{[]string{"run", "extra"}, exitUsage, "extra"},
		{[]string{"run"}, exitUsage, "FENCERIDER_VALKEY_URL: is not set"},
		{[]string{"policy", "check"}, exitUsage, "needs one file"},
		{[]string{"policy", "check", "/nowhere"}, exitUsage, "no such file"},
	} {
		code, out, errs := exec(t, nil, tc.args...)
		if code != tc.code || !strings.Contains(out+errs, tc.want) {
			t.Errorf("%v: code %d, %s%s", tc.args, code, out, errs)
		}
	}
}

func TestConfigHidesSecrets(t *testing.T) {
	env := []string{"FENCERIDER_VALKEY_URL=valkey://u:hunter2@127.0.0.1:1", "FENCERIDER_AMQP_URL=amqp://u:hunter2@127.0.0.1:1/", "FENCERIDER_VALKEY_PASSWORD=hunter2"}
	for _, args := range [][]string{{"config"}, {"config", "--json"}} {
		code, out, errs := exec(t, env, args...)
		if code != exitOK || strings.Contains(out+errs, "hunter2") || !strings.Contains(out, "127.0.0.1:1") {
			t.Errorf("%v: %d %s%s", args, code, out, errs)
		}
	}
}

func TestUnreachableStoreIsToldApart(t *testing.T) {
	env := []string{"FENCERIDER_VALKEY_URL=valkey://u:hunter2@127.0.0.1:1", "FENCERIDER_AMQP_URL=amqp://127.0.0.1:1/"}
	code, out, errs := exec(t, env, "init")
	if code != exitUnavailable || !strings.Contains(errs, "cannot make the namespace") || strings.Contains(out+errs, "hunter2") {
		t.Errorf("%d %s%s", code, out, errs)
	}
}

func TestPolicyCheck(t *testing.T) {
	write := func(text string) string {
		p := filepath.Join(t.TempDir(), "policy.yaml")
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	code, out, _ := exec(t, nil, "policy", "check", write("version: 1\ncouch: {unmatched: pass}\n"))
	if code != exitOK || !strings.Contains(out, "is valid") || !strings.Contains(out, "unprotected: couch.unmatched: pass") {
		t.Errorf("%d %s", code, out)
	}
	bad := write("version: 1\ncouhc: {}\n")
	code, _, errs := exec(t, nil, "policy", "check", bad)
	if code != exitUsage || !strings.Contains(errs, `line 2: unknown key "couhc", did you mean "couch"`) {
		t.Errorf("%d %s", code, errs)
	}
	env := []string{"FENCERIDER_VALKEY_URL=valkey://127.0.0.1:1", "FENCERIDER_AMQP_URL=amqp://127.0.0.1:1/", "FENCERIDER_POLICY_FILE=" + bad}
	if code, _, errs := exec(t, env, "run"); code != exitUsage || !strings.Contains(errs, "couhc") {
		t.Errorf("run with a bad policy: %d %s", code, errs)
	}
}

package config

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// least is an environment that is just enough.
func least(more ...string) []string {
	return append([]string{"HOME=/x", Prefix + "VALKEY_URL=valkey://u:hunter2@127.0.0.1:6379", Prefix + "AMQP_URL=amqp://u:hunter2@127.0.0.1/"}, more...)
}

func TestLoadDefaults(t *testing.T) {
	c, err := Load(least())
	if err != nil {
		t.Fatal(err)
	}
	if c.ArrivalBound != 5*time.Second || c.Namespace != "fencerider" || c.CouchListen != "127.0.0.1:5984" || c.LogMaxEntries != 10_000 || len(c.OperationClasses) != 1 || c.LeaseAgain {
		t.Errorf("%+v", c)
	}
	if pw, _ := c.ValkeyURL.Get().User.Password(); pw != "hunter2" {
		t.Error("the password is gone")
	}
}

func TestNothingShowsASecret(t *testing.T) {
	c, err := Load(least(Prefix + "VALKEY_PASSWORD=hunter2"))
	if err != nil {
		t.Fatal(err)
	}
	j, err := c.JSON()
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{c.Effective(), string(j), string(raw), fmt.Sprint(c), fmt.Sprintf("%+v %#v %s", *c, *c, c.ValkeyPassword)} {
		if strings.Contains(s, "hunter2") {
			t.Errorf("shown: %s", s)
		}
	}
	if c.ValkeyPassword.Reveal() != "hunter2" {
		t.Error("the secret is gone")
	}
	_, err = Load(least(Prefix+"COUCHDB_URL=://hunter2", Prefix+"VALKEY_URL=hunter2"))
	if err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("%v", err)
	}
}

func TestLoadRefuses(t *testing.T) {
	for _, tc := range []struct {
		env  []string
		want string
	}{
		{nil, "VALKEY_URL: is not set"},
		{[]string{Prefix + "VALKEY_URL=valkey://x"}, "nothing to stand in front of"},
		{least(Prefix + "VALKEY_ULR=x"), "did you mean FENCERIDER_VALKEY_URL?"},
		{least(Prefix + "SOMETHING_ELSE_ENTIRELY=x"), "is not a setting"},
		{least(Prefix + "ARRIVAL_BOUND=soon"), "ARRIVAL_BOUND: must be a time"},
		{least(Prefix + "ARRIVAL_BOUND=2h"), "ARRIVAL_BOUND: must be from 100ms to 60s"},
		{least(Prefix + "LOG_MAX_ENTRIES=many"), "LOG_MAX_ENTRIES: must be a number"},
		{least(Prefix + "LEASE_AGAIN=perhaps"), "LEASE_AGAIN: must be true or false"},
		{least(Prefix + "COUCHDB_URL=ftp://x"), `scheme "ftp"`},
		{least(Prefix + "SOCKET_MODE=rw"), "SOCKET_MODE: must be an octal mode"},
		{least(Prefix + "LOG_LEVEL=loud"), "LOG_LEVEL"},
		{least(Prefix+"TTL_DEFAULT=1s", Prefix+"TTL_MIN=2s"), "TTL_DEFAULT: must be longer"},
		{least(Prefix + "LEASE_TARGET_ID=x"), "LEASE_TENANT_ID: is not set"},
		{least(Prefix + "VALKEY_CA_FILE=x"), "VALKEY_CA_FILE"},
	} {
		_, err := Load(tc.env)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%v: %v, want %q", tc.env, err, tc.want)
		}
	}
	// Everything at once.
	_, err := Load(least(Prefix+"LOG_LEVEL=loud", Prefix+"SOCKET_MODE=rw"))
	if err == nil || len(strings.Split(err.Error(), "\n")) != 2 {
		t.Errorf("%v", err)
	}
	if _, err := Load(least(Prefix+"TEST_X=1", Prefix+"SERVICE_HOST=1", Prefix+"PORT_80_TCP=x", Prefix+"PORT=x", Prefix+"NAMESPACE=")); err != nil {
		t.Errorf("not ours: %v", err)
	}
}

func TestSecretsFromFiles(t *testing.T) {
	write := func(name, text string, mode os.FileMode) string {
		p := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(p, mode); err != nil {
			t.Fatal(err)
		}
		return p
	}
	v := Prefix + "VALKEY_PASSWORD"
	c, err := Load(least(v + "_FILE=" + write("ok", "hunter2\n", 0o600)))
	if err != nil || c.ValkeyPassword.Reveal() != "hunter2" {
		t.Fatalf("%v", err)
	}
	for name, env := range map[string][]string{
		"open to all": {v + "_FILE=" + write("w", "x", 0o644)}, "missing": {v + "_FILE=/nowhere"}, "empty": {v + "_FILE=" + write("e", "\n", 0o600)},
		"directory": {v + "_FILE=" + t.TempDir()}, "both": {v + "=x", v + "_FILE=" + write("b", "x", 0o600)}, "large": {v + "_FILE=" + write("l", strings.Repeat("x", maxSecretFile+1), 0o600)},
	} {
		if _, err := Load(least(env...)); err == nil || !strings.Contains(err.Error(), v) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTableAndExampleAreComplete(t *testing.T) {
	for _, f := range fields() {
		if f.doc == "" || !strings.Contains(Table(), "`"+f.name+"`") || !strings.Contains(Example(), "#"+f.name+"=") {
			t.Errorf("%s is not documented", f.name)
		}
		if (f.min == "") != (f.max == "") {
			t.Errorf("%s has half a range", f.name)
		}
	}
}

// TestReadmeTable holds the table in README to the struct.
func TestReadmeTable(t *testing.T) {
	b, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	const begin, end = "<!-- config:begin -->\n", "<!-- config:end -->"
	_, rest, ok := strings.Cut(string(b), begin)
	table, _, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatal("README has no table of settings")
	}
	if strings.TrimSpace(table) != strings.TrimSpace(Table()) {
		t.Error("the table in README is not that of the struct: put the output of `go run ./cmd/fencerider config --table` there")
	}
}

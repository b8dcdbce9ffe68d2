package deploy

import (
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/starintel/fencerider/config"
)

// read reads a file of the project.
func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestComposeIsSound(t *testing.T) {
	var file struct {
		Services map[string]struct {
			Image       string            `yaml:"image"`
			Build       map[string]string `yaml:"build"`
			Environment map[string]string `yaml:"environment"`
			DependsOn   any               `yaml:"depends_on"`
			Volumes     []string          `yaml:"volumes"`
		} `yaml:"services"`
	}
	if err := yaml.Unmarshal([]byte(read(t, "compose.yaml")), &file); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"valkey", "rabbitmq", "couchdb", "init", "sidecar", "worker"} {
		if _, ok := file.Services[name]; !ok {
			t.Errorf("no service %s", name)
		}
	}
	known := config.Names()
	for name, s := range file.Services {
		if (s.Image == "") == (s.Build == nil) {
			t.Errorf("%s has neither an image nor a build, or both", name)
		}
		for v := range s.Environment {
			if strings.HasPrefix(v, config.Prefix) && !slices.Contains(known, v) {
				t.Errorf("%s sets %s, which is not a setting", name, v)
			}
		}
		for _, v := range s.Volumes {
			if src, _, _ := strings.Cut(v, ":"); strings.HasPrefix(src, "./") {
				if _, err := os.Stat(src); err != nil {
					t.Errorf("%s mounts %s: %v", name, src, err)
				}
			}
		}
	}
	// The settings of the sidecar are a configuration that loads.
	var env []string
	for k, v := range file.Services["sidecar"].Environment {
		env = append(env, k+"="+regexp.MustCompile(`\$\{[A-Z_]+:-([^}]*)\}`).ReplaceAllString(v, "$1"))
	}
	if _, err := config.Load(env); err != nil {
		t.Errorf("the sidecar's settings: %v", err)
	}
}

func TestDockerfileBuildsWithTheModulesGo(t *testing.T) {
	m := regexp.MustCompile(`(?m)^go (\S+)$`).FindStringSubmatch(read(t, "../go.mod"))
	if m == nil || !strings.Contains(read(t, "../Dockerfile"), "FROM golang:"+m[1]+" ") {
		t.Errorf("Dockerfile and go.mod name different versions of Go")
	}
}

func TestShippedStoreSettingsAreWhatTheStoreDemands(t *testing.T) {
	conf := read(t, "valkey/valkey.conf")
	for _, line := range []string{"appendonly yes", "maxmemory-policy noeviction", "appendfsync always"} {
		if !strings.Contains(conf, "\n"+line+"\n") {
			t.Errorf("valkey.conf lacks %q", line)
		}
	}
	acl := read(t, "valkey/users.acl")
	for _, forbidden := range []string{"+@all", "allkeys", "+config", "+flushall", "+keys", "nopass"} {
		if strings.Contains(acl, forbidden) {
			t.Errorf("users.acl grants %s", forbidden)
		}
	}
}

func TestScriptsParse(t *testing.T) {
	for _, f := range []string{"services.sh", "go.sh", "test.sh", "check.sh", "demo/run.sh", "../.ci/run"} {
		if out, err := exec.Command("bash", "-n", f).CombinedOutput(); err != nil {
			t.Errorf("%s: %v %s", f, err, out)
		}
	}
}

func TestLockFileNamesNoOtherRegistry(t *testing.T) {
	for m := range strings.SplitSeq(read(t, "pouchdb/package-lock.json"), "\n") {
		if strings.Contains(m, `"resolved"`) {
			t.Fatalf("the lock file names where a package was fetched from: %s", strings.TrimSpace(m))
		}
	}
}

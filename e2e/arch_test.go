package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/starintel/fencerider/"

// allowed says which rooms a room may import. Everything else is an arrow the
// wrong way.
var allowed = map[string][]string{
	"cmd":         {"config", "proxy", "couch", "rabbit", "fence", "leaseclient"},
	"config":      {"fence"},
	"proxy":       {"couch", "rabbit", "fence", "leaseclient"},
	"couch":       {"fence", "leaseclient"},
	"rabbit":      {"fence", "leaseclient"},
	"fence":       {"leaseclient"},
	"leaseclient": {},
	"deploy":      {"config"},
	"e2e":         {"fence", "leaseclient"},
}

// pkg is what `go list` says of a package.
type pkg struct {
	ImportPath string
	Doc        string
	Imports    []string
	GoFiles    []string
}

// packages lists all packages of the module.
func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Doc,Imports,GoFiles", "./...")
	cmd.Dir = ".."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []pkg
	dec := json.NewDecoder(strings.NewReader(string(out)))
	for dec.More() {
		var p pkg
		if err := dec.Decode(&p); err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if len(all) < 10 {
		t.Fatalf("only %d packages", len(all))
	}
	return all
}

// room is the first part of a path inside the module.
func room(path string) string {
	r, _, _ := strings.Cut(strings.TrimPrefix(path, module), "/")
	return r
}

func TestArrowsPointOneWay(t *testing.T) {
	for _, p := range packages(t) {
		from := room(p.ImportPath)
		may, known := allowed[from]
		if !known {
			t.Errorf("%s is in no room that is planned", p.ImportPath)
			continue
		}
		for _, i := range p.Imports {
			if to := room(i); strings.HasPrefix(i, module) && to != from && !slices.Contains(may, to) {
				t.Errorf("%s imports %s", p.ImportPath, i)
			}
			if strings.Contains(i, "valkey-go") && !strings.HasSuffix(p.ImportPath, "leaseclient/valkeystore") {
				t.Errorf("%s imports %s: only the store sees Valkey", p.ImportPath, i)
			}
			if from != "cmd" && strings.HasSuffix(i, "valkeystore") {
				t.Errorf("%s imports the store itself", p.ImportPath)
			}
			if from == "leaseclient" && strings.Contains(i, "zap") {
				t.Errorf("%s forces a logger on its users", p.ImportPath)
			}
			if strings.HasSuffix(i, "leasetest") || strings.HasSuffix(i, "fencetest") {
				t.Errorf("%s imports a test helper", p.ImportPath)
			}
		}
	}
}

func TestEveryPackageSaysWhatItIsFor(t *testing.T) {
	for _, p := range packages(t) {
		if len(p.GoFiles) > 0 && len(p.Doc) < 40 {
			t.Errorf("%s has no doc comment", p.ImportPath)
		}
	}
}

func TestTopLevelIsFixed(t *testing.T) {
	known := []string{
		"cmd", "proxy", "fence", "couch", "rabbit", "leaseclient", "config", "deploy", "e2e", "go.mod", "go.sum", "Dockerfile", "README.md",
		"Makefile", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "bin",
	}
	entries, err := os.ReadDir("..")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") && !slices.Contains(known, e.Name()) {
			t.Errorf("%s does not belong at the top level", e.Name())
		}
	}
}

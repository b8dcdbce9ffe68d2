package leaseclient_test

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/starintel/fencerider/leaseclient"
)

func TestLockKeyVectors(t *testing.T) {
	b, err := os.ReadFile("testdata/lock-keys.json")
	if err != nil {
		t.Fatal(err)
	}
	var v struct {
		Accepted []struct {
			Input     leaseclient.Identity `json:"input"`
			Canonical string               `json:"canonical"`
			LockKey   string               `json:"lock_key"`
		} `json:"accepted"`
		Refused []struct {
			Input     leaseclient.Identity `json:"input"`
			Component string               `json:"component"`
		} `json:"refused"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatal(err)
	}
	if len(v.Accepted) == 0 || len(v.Refused) == 0 {
		t.Fatal("no vectors")
	}
	for i, a := range v.Accepted {
		id, err := a.Input.Normalize()
		if err != nil {
			t.Errorf("vector %d: %v", i, err)
			continue
		}
		if id.Canonical() != a.Canonical || id.LockKey() != a.LockKey {
			t.Errorf("vector %d: %s %s, want %s %s", i, id.Canonical(), id.LockKey(), a.Canonical, a.LockKey)
		}
		if back, err := leaseclient.ParseCanonical(id.Canonical()); err != nil || back != id {
			t.Errorf("vector %d: %+v %v", i, back, err)
		}
		if again, err := id.Normalize(); err != nil || again != id {
			t.Errorf("vector %d is not stable", i)
		}
	}
	for i, r := range v.Refused {
		_, err := r.Input.Normalize()
		e, ok := errors.AsType[*leaseclient.InvalidError](err)
		if !ok || e.Field != r.Component {
			t.Errorf("refused vector %d: %v, want %s at fault", i, err, r.Component)
		}
	}
}

func TestEveryComponentSeparates(t *testing.T) {
	base := leaseclient.Identity{TenantID: "a", ProgramID: "a", TargetNamespace: "a", TargetID: "a", ActorName: "a", WorkflowName: "a", OperationClass: "a"}
	seen := map[string]bool{base.LockKey(): true}
	for _, change := range []func(*leaseclient.Identity){
		func(i *leaseclient.Identity) { i.TenantID = "b" }, func(i *leaseclient.Identity) { i.ProgramID = "b" },
		func(i *leaseclient.Identity) { i.TargetNamespace = "b" }, func(i *leaseclient.Identity) { i.TargetID = "b" },
		func(i *leaseclient.Identity) { i.ActorName = "b" }, func(i *leaseclient.Identity) { i.WorkflowName = "b" },
		func(i *leaseclient.Identity) { i.OperationClass = "b" },
	} {
		id := base
		change(&id)
		if seen[id.LockKey()] {
			t.Errorf("%+v collides", id)
		}
		seen[id.LockKey()] = true
	}
}

func FuzzNormalize(f *testing.F) {
	f.Add("Target-1")
	f.Add("e\u0301")
	f.Add("\u0130")
	f.Fuzz(func(t *testing.T, s string) {
		id := leaseclient.Identity{TenantID: "a", ProgramID: "a", TargetNamespace: "a", TargetID: s, ActorName: "a"}
		n, err := id.Normalize()
		if err != nil {
			if len(s) > 3 && strings.Contains(err.Error(), s) {
				t.Fatalf("error repeats the value: %v", err)
			}
			return
		}
		again, err := n.Normalize()
		if err != nil || again != n {
			t.Fatalf("%q: %+v, then %+v, %v", s, n, again, err)
		}
		if _, err := leaseclient.ParseLockKey(n.LockKey()); err != nil {
			t.Fatal(err)
		}
	})
}

func TestCodesAreClosed(t *testing.T) {
	seen := map[leaseclient.Code]bool{}
	for _, row := range leaseclient.Codes() {
		if seen[row.Code] || row.HTTP == 0 || row.Audit == "" || row.Message == "" {
			t.Errorf("row %+v", row)
		}
		seen[row.Code] = true
	}
	if leaseclient.Code("nonsense").Info().Code != leaseclient.CodeInternal {
		t.Error("an unknown code is not an internal error")
	}
	e := leaseclient.AsError(errors.New("dial tcp 10.0.0.1: secret"))
	if e.Code != leaseclient.CodeInternal || strings.Contains(e.Public(), "10.0.0.1") {
		t.Errorf("%v shows %s", e, e.Public())
	}
}

func TestMetadataIsBoundedAndHoldsNoSecrets(t *testing.T) {
	many := map[string]any{}
	for i := range leaseclient.MaxMetadataKeys + 1 {
		many[strings.Repeat("k", i+1)] = 1
	}
	for name, m := range map[string]map[string]any{
		"password": {"db_password": "x"}, "nested": {"a": map[string]any{"api_key": "x"}}, "many": many,
		"long": {"a": strings.Repeat("x", leaseclient.MaxMetadataBytes)}, "deep": {"a": []any{[]any{[]any{[]any{1}}}}}, "type": {"a": make(chan int)},
	} {
		if _, err := leaseclient.EncodeMetadata(m); leaseclient.CodeOf(err) != leaseclient.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if s, err := leaseclient.EncodeMetadata(map[string]any{"b": "<é>", "a": 1}); err != nil || s != `{"a":1,"b":"<é>"}` {
		t.Errorf("%s %v", s, err)
	}
}

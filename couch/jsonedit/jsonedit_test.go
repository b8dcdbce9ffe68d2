package jsonedit

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"
)

// parseOK parses an object that the test knows to be good.
func parseOK(t testing.TB, text string) *Object {
	t.Helper()
	o, err := ParseObject([]byte(text), Limits{})
	if err != nil {
		t.Fatalf("parse %q: %v", text, err)
	}
	return o
}

func TestParseRefusesWhatCouchDBRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"empty":                     "",
		"only space":                " \n",
		"byte order mark":           "\xef\xbb\xbf{}",
		"utf-16":                    "\xff\xfe{\x00}\x00",
		"bad utf-8":                 "{\"a\":\"\xff\"}",
		"overlong utf-8":            "{\"a\":\"\xc0\xaf\"}",
		"surrogate as utf-8":        "{\"a\":\"\xed\xa0\x80\"}",
		"bad utf-8 in a name":       "{\"\xff\":1}",
		"lone high surrogate":       `{"a":"\ud800"}`,
		"lone low surrogate":        `{"a":"\udc00"}`,
		"two high surrogates":       `{"a":"\ud800\ud800"}`,
		"high surrogate, then text": `{"a":"\ud800x"}`,
		"raw newline in string":     "{\"a\":\"x\ny\"}",
		"raw nul in string":         "{\"a\":\"\x00\"}",
		"nul outside":               "{}\x00",
		"comment":                   `{/*x*/}`,
		"NaN":                       `{"a":NaN}`,
		"Infinity":                  `{"a":Infinity}`,
		"minus Infinity":            `{"a":-Infinity}`,
		"out of range":              `{"a":1e400}`,
		"minus out of range":        `{"a":-1e400}`,
		"long fraction":             `{"a":` + strings.Repeat("9", 400) + `.0}`,
		"trailing garbage":          `{} x`,
		"two values":                `{}{}`,
		"trailing comma":            `{"a":1,}`,
		"leading comma":             `{,"a":1}`,
		"trailing comma in array":   `[1,]`,
		"single quotes":             `{'a':1}`,
		"bare name":                 `{a:1}`,
		"no colon":                  `{"a" 1}`,
		"no value":                  `{"a":}`,
		"no end":                    `{"a":1`,
		"no end of array":           `[1`,
		"no end of string":          `{"a":"x`,
		"ends in escape":            `{"a":"\`,
		"unknown escape":            `{"a":"\x41"}`,
		"short escape":              `{"a":"\u12"}`,
		"bad hex":                   `{"a":"\u12g4"}`,
		"leading zero":              `{"a":01}`,
		"plus sign":                 `{"a":+1}`,
		"bare minus":                `{"a":-}`,
		"no digit after point":      `{"a":1.}`,
		"no digit before point":     `{"a":.5}`,
		"no digit in exponent":      `{"a":1e}`,
		"hexadecimal":               `{"a":0x10}`,
		"capital word":              `{"a":True}`,
		"short word":                `{"a":tru`,
		"vertical tab as space":     "{\v}",
		"no-break space as space":   "{\u00a0}",
		"digits without end":        `{"a":` + strings.Repeat("1", maxNumber+1) + `}`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(text), Limits{})
			var syntax *SyntaxError
			if !errors.As(err, &syntax) {
				t.Fatalf("Parse(%q) = %v, want a SyntaxError", text, err)
			}
			if syntax.Offset < 0 || syntax.Offset > len(text) {
				t.Errorf("offset %d lies outside a text of %d bytes", syntax.Offset, len(text))
			}
		})
	}
}

func TestParseAcceptsWhatCouchDBAccepts(t *testing.T) {
	for name, text := range map[string]string{
		"space around":     " \t\r\n{ } \n",
		"empty name":       `{"":1}`,
		"big integer":      `{"n":12345678901234567890123456789012345}`,
		"long integer":     `{"n":` + strings.Repeat("9", 400) + `}`,
		"exponent":         `{"n":1e2,"m":-1.5E+10,"o":1e-400}`,
		"minus zero":       `{"n":-0}`,
		"escaped nul":      `{"a":"\u0000"}`,
		"surrogate pair":   `{"a":"\ud83d\ude00"}`,
		"raw astral":       `{"a":"😀"}`,
		"delete character": "{\"a\":\"\x7f\"}",
		"noncharacter":     `{"a":"\uffff"}`,
		"duplicate names":  `{"a":1,"a":2}`,
		"deep":             strings.Repeat("[", 2000) + strings.Repeat("]", 2000),
		"all kinds":        `[null,true,false,0,"",{},[]]`,
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Parse([]byte(text), Limits{}); err != nil {
				t.Fatalf("Parse(%q): %v", text, err)
			}
		})
	}
}

func TestParseLimits(t *testing.T) {
	if _, err := Parse([]byte(`[[[]]]`), Limits{MaxDepth: 3}); err != nil {
		t.Errorf("depth at the limit: %v", err)
	}
	if _, err := Parse([]byte(`[[{"a":[]}]]`), Limits{MaxDepth: 3}); !errors.Is(err, ErrTooDeep) {
		t.Errorf("depth over the limit: %v, want ErrTooDeep", err)
	}
	if _, err := Parse([]byte(strings.Repeat("[", 1<<20)), Limits{}); !errors.Is(err, ErrTooDeep) {
		t.Errorf("a million brackets: %v, want ErrTooDeep", err)
	}
	if _, err := Parse([]byte(`"xy"`), Limits{MaxBytes: 4}); err != nil {
		t.Errorf("size at the limit: %v", err)
	}
	if _, err := Parse([]byte(`"xyz"`), Limits{MaxBytes: 4}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("size over the limit: %v, want ErrTooLarge", err)
	}
	for _, text := range []string{`[]`, `1`, `"{}"`, `null`} {
		if _, err := ParseObject([]byte(text), Limits{}); !errors.Is(err, ErrNotObject) {
			t.Errorf("ParseObject(%s) = %v, want ErrNotObject", text, err)
		}
	}
}

func TestLastDuplicateWinsWhateverItsSpelling(t *testing.T) {
	o := parseOK(t, `{"_id":"first","\u005fid":"second","a":{"b":1,"\u0062":2},"a":{"b":{"c":"deep","c":"deeper"}}}`)
	if v, _ := o.Member("_id"); string(v.Bytes()) != `"second"` {
		t.Errorf("_id = %s, want the last one", v.Bytes())
	}
	if v, ok := o.Lookup("a.b.c"); !ok || string(v.Bytes()) != `"deeper"` {
		t.Errorf("a.b.c = %s (%v), want deeper", v.Bytes(), ok)
	}
	for _, path := range []string{"x", "a.x", "a.b.c.d", "", "a..b"} {
		if v, ok := o.Lookup(path); ok {
			t.Errorf("Lookup(%q) = %s, want nothing", path, v.Bytes())
		}
	}
	var names []string
	for name := range o.Names() {
		names = append(names, name)
	}
	if got := strings.Join(names, ","); got != "_id,_id,a,a" {
		t.Errorf("names = %s", got)
	}
	// Names match exactly, unlike struct fields of the standard library.
	if _, ok := parseOK(t, `{"_ID":"x"}`).Member("_id"); ok {
		t.Error("_ID was taken for _id")
	}
}

func TestText(t *testing.T) {
	for text, want := range map[string]string{
		`"plain"`:                  "plain",
		`"\"\\\/\b\f\n\r\t"`:       "\"\\/\b\f\n\r\t",
		`"\u0041\u00e4\u20AC"`:     "Aä€",
		`"\ud83d\ude00 x"`:         "😀 x",
		`"ä\u0000\u005f"`:          "ä\x00_",
		`"a\\u0041"`:               `a\u0041`,
		`"` + "\u2028" + `\u2028"`: "\u2028\u2028",
	} {
		v, err := Parse([]byte(text), Limits{})
		if err != nil {
			t.Fatalf("parse %s: %v", text, err)
		}
		if got, ok := v.Text(); !ok || got != want {
			t.Errorf("Text(%s) = %q, want %q", text, got, want)
		}
	}
	for _, text := range []string{`1`, `null`, `{}`, `["x"]`, `true`} {
		v, _ := Parse([]byte(text), Limits{})
		if got, ok := v.Text(); ok {
			t.Errorf("Text(%s) = %q, want none", text, got)
		}
	}
	if _, ok := (Value{}).Text(); ok {
		t.Error("the zero value has a text")
	}
}

func TestKindAndTrue(t *testing.T) {
	for text, want := range map[string]Kind{
		`null`: Null, `true`: Bool, `false`: Bool, `-1`: Number, `0`: Number, `""`: String, `[]`: Array, `{}`: Container,
	} {
		v, err := Parse([]byte(" "+text+" "), Limits{})
		if err != nil {
			t.Fatal(err)
		}
		if v.Kind() != want {
			t.Errorf("Kind(%s) = %d, want %d", text, v.Kind(), want)
		}
		if v.True() != (text == "true") {
			t.Errorf("True(%s) = %v", text, v.True())
		}
		if string(v.Bytes()) != text {
			t.Errorf("Bytes = %q, want %q without the space around it", v.Bytes(), text)
		}
	}
	if (Value{}).Kind() != None || (Value{}).True() {
		t.Error("the zero value is something")
	}
}

func TestElements(t *testing.T) {
	v, _ := Parse([]byte(`[ 1 , "a,]" ,{"b":[2,3]}, [] ]`), Limits{})
	var got []string
	for e := range v.Elements() {
		got = append(got, string(e.Bytes()))
	}
	if want := `1|"a,]"|{"b":[2,3]}|[]`; strings.Join(got, "|") != want {
		t.Errorf("elements = %q, want %q", strings.Join(got, "|"), want)
	}
	seen := 0
	for range v.Elements() {
		if seen++; seen == 2 {
			break
		}
	}
	if seen != 2 {
		t.Errorf("a loop that stops at two saw %d", seen)
	}
	obj, _ := Parse([]byte(`{"a":1}`), Limits{})
	for e := range obj.Elements() {
		t.Errorf("an object has the element %s", e.Bytes())
	}
}

func TestWithKeepsEveryOtherByte(t *testing.T) {
	const stamp = `{"t":7}`
	for _, c := range []struct{ name, in, want string }{
		{"empty", `{}`, `{"fence":{"t":7}}`},
		{"empty with space", `{ }`, `{"fence":{"t":7} }`},
		{"one member", `{"a":1}`, `{"a":1,"fence":{"t":7}}`},
		{"space before the brace", "{\n  \"a\": 1\n}", "{\n  \"a\": 1,\"fence\":{\"t\":7}\n}"},
		{"first", `{"fence":0,"a":1}`, `{"a":1,"fence":{"t":7}}`},
		{"middle", `{"a":1 , "fence":0 ,  "b":2}`, `{"a":1 ,  "b":2,"fence":{"t":7}}`},
		{"last", `{"a":1, "fence":{"x":[1,"}"]} }`, `{"a":1,"fence":{"t":7} }`},
		{"only", `{ "fence" : 0 }`, `{"fence":{"t":7}  }`},
		{"many", `{"fence":1,"a":1,"fence":2,"fence":3,"b":2,"fence":4}`, `{"a":1,"b":2,"fence":{"t":7}}`},
		{"all of them", `{"fence":1,"fence":2}`, `{"fence":{"t":7}}`},
		{"escaped", `{"\u0066ence":1,"f\u0065nce":2,"a":1}`, `{"a":1,"fence":{"t":7}}`},
		{"escaped upper-case hex", `{"a":1,"\u0066enc\u0065":1}`, `{"a":1,"fence":{"t":7}}`},
		{"not by another name", `{"Fence":1,"fence ":2,"\\u0066ence":3}`, `{"Fence":1,"fence ":2,"\\u0066ence":3,"fence":{"t":7}}`},
		{"nested stays", `{"a":{"fence":1}}`, `{"a":{"fence":1},"fence":{"t":7}}`},
		{"numbers stay", `{"n":1.0,"m":1e2,"o":-0,"p":123456789012345678901234567890}`, `{"n":1.0,"m":1e2,"o":-0,"p":123456789012345678901234567890,"fence":{"t":7}}`},
		{"duplicates stay", `{"k":1,"k":2}`, `{"k":1,"k":2,"fence":{"t":7}}`},
		{"outer space goes", " {\"a\":1} \n", `{"a":1,"fence":{"t":7}}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := []byte(c.in)
			o, err := ParseObject(in, Limits{})
			if err != nil {
				t.Fatal(err)
			}
			got, err := o.With(Member{"fence", []byte(stamp)})
			if err != nil {
				t.Fatal(err)
			}
			if string(got) != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
			if string(in) != c.in {
				t.Errorf("the input was changed to %s", in)
			}
			again, err := parseOK(t, string(got)).With(Member{"fence", []byte(stamp)})
			if err != nil || !bytes.Equal(again, got) {
				t.Errorf("a second time gives %s (%v)", again, err)
			}
		})
	}
}

func TestWithSeveral(t *testing.T) {
	o := parseOK(t, `{"_rev":"1-a","x":1,"fence":0}`)
	got, err := o.With(Member{"_rev", Quote("2-b")}, Member{"fence", []byte(`{}`)})
	if err != nil || string(got) != `{"x":1,"_rev":"2-b","fence":{}}` {
		t.Errorf("got %s (%v)", got, err)
	}
	if got, err := o.With(); err != nil || string(got) != string(o.Bytes()) {
		t.Errorf("nothing set: %s (%v)", got, err)
	}
	if got, err := o.With(Member{"fence", []byte(`{`)}); err == nil {
		t.Errorf("a broken value was spliced in: %s", got)
	}
	got, err = o.With(Member{"a\"\n<é", []byte(`1`)})
	if err != nil {
		t.Fatal(err)
	}
	if v, ok := parseOK(t, string(got)).Member("a\"\n<é"); !ok || string(v.Bytes()) != "1" {
		t.Errorf("a strange name did not survive: %s", got)
	}
}

func TestWithout(t *testing.T) {
	for in, want := range map[string]string{
		`{"_rev":"1-a","a":1}`:           `{"a":1}`,
		`{"a":1,"\u005frev":"x"}`:        `{"a":1}`,
		`{ "_rev" : 1 , "b" : 2 }`:       `{ "b" : 2 }`,
		`{"a":1,"_rev":1,"_id":2,"b":3}`: `{"a":1,"b":3}`,
		`{}`:                             `{}`,
		`{ "_id":1 }`:                    `{  }`,
	} {
		if got := parseOK(t, in).Without("_rev", "_id"); string(got) != want {
			t.Errorf("Without(%s) = %s, want %s", in, got, want)
		}
	}
}

// TestRecordedDocuments runs the laws over the documents of a recorded conversation with CouchDB, so that they
// are held against texts that nobody wrote for this package.
func TestRecordedDocuments(t *testing.T) {
	data, err := os.ReadFile("testdata/documents.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.Split(bytes.TrimSpace(data), []byte("\n"))
	if len(lines) < 20 {
		t.Fatalf("only %d documents", len(lines))
	}
	for _, line := range lines {
		checkLaws(t, line)
	}
}

// checkLaws holds one text against the laws of the package.
func checkLaws(t testing.TB, src []byte) {
	t.Helper()
	before := append([]byte(nil), src...)
	v, err := Parse(src, Limits{})
	if err != nil {
		var syntax *SyntaxError
		if !errors.As(err, &syntax) && !errors.Is(err, ErrTooDeep) && !errors.Is(err, ErrTooLarge) {
			t.Fatalf("an untyped error: %v", err)
		}
		return
	}
	if !json.Valid(src) {
		t.Fatalf("accepted what is not JSON: %q", src)
	}
	o, ok := v.Object()
	if !ok {
		return
	}
	stamp := Member{"fence", []byte(`{"fencing_token":7}`)}
	with, err := o.With(stamp)
	if err != nil {
		t.Fatal(err)
	}
	stamped, err := ParseObject(with, Limits{MaxBytes: 1 << 30})
	if err != nil {
		t.Fatalf("the stamped text is not JSON: %v\n%s", err, with)
	}
	if got, _ := stamped.Member("fence"); string(got.Bytes()) != string(stamp.Value) {
		t.Fatalf("the stamp reads back as %s", got.Bytes())
	}
	if twice, _ := stamped.With(stamp); !bytes.Equal(twice, with) {
		t.Fatalf("stamped twice:\n%s\n%s", with, twice)
	}
	bare := o.Without("fence")
	if !bytes.Equal(stamped.Without("fence"), bare) {
		t.Fatalf("removing after stamping differs from removing before:\n%s\n%s", stamped.Without("fence"), bare)
	}
	if rest := parseOK(t, string(bare)); len(rest.members) > 0 {
		if _, there := rest.Member("fence"); there {
			t.Fatalf("a fence survived: %s", bare)
		}
	}
	// The values are those that another parser sees, but for the stamp.
	var mine, theirs map[string]json.RawMessage
	if err := json.Unmarshal(with, &mine); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(src, &theirs); err != nil {
		t.Fatal(err)
	}
	delete(mine, "fence")
	delete(theirs, "fence")
	if len(mine) != len(theirs) {
		t.Fatalf("%d members became %d", len(theirs), len(mine))
	}
	for name, value := range theirs {
		if !bytes.Equal(mine[name], value) {
			t.Fatalf("member %q was %s and is %s", name, value, mine[name])
		}
		if got, ok := o.Member(name); !ok || !bytes.Equal(got.Bytes(), value) {
			t.Fatalf("Member(%q) = %s, another parser says %s", name, got.Bytes(), value)
		}
		if text, ok := (Value{raw: value}).Text(); ok {
			var want string
			if err := json.Unmarshal(value, &want); err != nil || text != want {
				t.Fatalf("Text(%s) = %q, another parser says %q (%v)", value, text, want, err)
			}
		}
	}
	if !bytes.Equal(src, before) {
		t.Fatal("the input was changed")
	}
}

func FuzzLaws(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{ "fence" : 1 , "a":[1,{"fence":2}] }`, `{"\u0066ence":1,"a":"\ud83d\ude00"}`, `{"a":1e400}`,
		`{"a":1,"a":2,"fence":3,"fence":4}`, "{\"a\":\"\xff\"}", `[1]`, `{"n":-0.0e-1}`, `{"":{"":1}}`,
		" {\n\t\"_id\": \"x\",\r\n \"fence\":null\n}\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, src []byte) { checkLaws(t, src) })
}

// FuzzAcceptance compares what is accepted with another parser: everything that is refused must have one of the
// few reasons for which this package is stricter.
func FuzzAcceptance(f *testing.F) {
	for _, seed := range []string{`{"a":[1,2.5e3,"x\n"]}`, `"\ud800"`, `1e999`, "\xef\xbb\xbf{}", `[true,false,null]`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, src []byte) {
		_, err := Parse(src, Limits{})
		if err == nil || !json.Valid(src) || errors.Is(err, ErrTooDeep) || errors.Is(err, ErrTooLarge) {
			return
		}
		var syntax *SyntaxError
		if !errors.As(err, &syntax) {
			t.Fatalf("an untyped error: %v", err)
		}
		switch syntax.What {
		case "a string is not UTF-8", "a surrogate has no partner", "a number is out of range", "a number is too long":
		default:
			t.Fatalf("refused %q, which is valid: %v", src, err)
		}
	})
}

func BenchmarkWith(b *testing.B) {
	src := []byte(`{"_id":"x","_rev":"1-0123456789abcdef0123456789abcdef","list":[` + strings.Repeat(`{"k":"value","n":1.5},`, 200) + `1],"fence":{"t":1}}`)
	stamp := Member{"fence", []byte(`{"t":2}`)}
	b.SetBytes(int64(len(src)))
	b.ReportAllocs()
	for b.Loop() {
		o, err := ParseObject(src, Limits{})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := o.With(stamp); err != nil {
			b.Fatal(err)
		}
	}
}

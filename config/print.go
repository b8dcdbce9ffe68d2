package config

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
)

// shown is a field's value as it may be shown.
func shown(v reflect.Value) string {
	switch x := v.Interface().(type) {
	case []string:
		return strings.Join(x, ",")
	default:
		return fmt.Sprint(x)
	}
}

// Table is the reference of all settings in Markdown.
func Table() string {
	var b strings.Builder
	b.WriteString("| variable | default | meaning |\n|---|---|---|\n")
	for _, f := range fields() {
		def := "none"
		if f.def != "" {
			def = "`" + f.def + "`"
		}
		doc := f.doc
		if f.min != "" {
			doc += fmt.Sprintf(" (%s to %s)", f.min, f.max)
		}
		if f.need {
			doc += ". Required"
		}
		if f.file {
			doc += fmt.Sprintf(". Also as `%s_FILE`", f.name)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", f.name, def, strings.ReplaceAll(doc, "|", `\|`))
	}
	return b.String()
}

// Effective shows the configuration that is in force, one variable a line.
func (c *Config) Effective() string {
	var b strings.Builder
	v := reflect.ValueOf(*c)
	for _, f := range fields() {
		fmt.Fprintf(&b, "%s=%s\n", f.name, shown(v.Field(f.index)))
	}
	return b.String()
}

// JSON shows the configuration that is in force.
func (c *Config) JSON() ([]byte, error) {
	out := make(map[string]string)
	v := reflect.ValueOf(*c)
	for _, f := range fields() {
		out[f.name] = shown(v.Field(f.index))
	}
	return json.MarshalIndent(out, "", "  ")
}

// Example is a file of all settings with their meaning, every one commented out.
func Example() string {
	var b strings.Builder
	b.WriteString("# Settings of fencerider. A line without its # overrides the default.\n")
	for _, f := range fields() {
		fmt.Fprintf(&b, "\n# %s", f.doc)
		if f.min != "" {
			fmt.Fprintf(&b, " (%s to %s)", f.min, f.max)
		}
		fmt.Fprintf(&b, "\n#%s=%s\n", f.name, f.def)
	}
	return b.String()
}

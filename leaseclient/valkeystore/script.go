package valkeystore

import (
	"embed"
	"fmt"
	"strings"

	"github.com/valkey-io/valkey-go"
)

//go:embed scripts/*.lua
var scriptFiles embed.FS

// script is one operation of the store.
type script struct {
	// name is the file's name without its suffix, and what logs and metrics say.
	name string
	// source is the text that the server runs.
	source string
	lua    *valkey.Lua
}

// scripts is the closed set of operations.
var scripts = struct {
	marker, init                     *script
	acquire, renew, release, inspect *script
	adopt, list, history             *script
	invalidate, inflight             *script
	begin, end                       *script
	claim, unclaim, unsettled        *script
}{
	marker: mustScript("marker"), init: mustScript("init"),
	acquire: mustScript("acquire"), renew: mustScript("renew"), release: mustScript("release"), inspect: mustScript("inspect"),
	adopt: mustScript("adopt"), list: mustScript("list"), history: mustScript("history"),
	invalidate: mustScript("invalidate"), inflight: mustScript("inflight"),
	begin: mustScript("begin"), end: mustScript("end"),
	claim: mustScript("claim"), unclaim: mustScript("unclaim"), unsettled: mustScript("unsettled"),
}

// epilogue runs a script's body and appends to the time in its answer the leases
// that the run was the first to see expired.
const epilogue = `
end
local out = main()
if #SEEN > 0 then out[2] = out[2] .. ' ' .. cjson.encode(SEEN) end
return out
`

// mustScript puts the prelude behind a script's first line and makes a function
// of the rest. The files are part of the binary, so a missing one is a broken
// build.
func mustScript(name string) *script {
	prelude, err := scriptFiles.ReadFile("scripts/prelude.lua")
	if err != nil {
		panic(fmt.Sprintf("read embedded prelude: %v", err))
	}
	body, err := scriptFiles.ReadFile("scripts/" + name + ".lua")
	if err != nil {
		panic(fmt.Sprintf("read embedded script: %v", err))
	}
	engine, rest, ok := strings.Cut(string(body), "\n")
	if !ok || !strings.HasPrefix(engine, "#!lua") {
		panic(fmt.Sprintf("script %s does not name its engine", name))
	}
	source := engine + "\n" + string(prelude) + "\nlocal function main()\n" + rest + epilogue
	// Never the retryable form: a script whose answer was lost may have run.
	return &script{name: name, source: source, lua: valkey.NewLuaScript(source)}
}

# Sourced by the scripts that build, from the top of the project: makes sure that
# `go` is one that go.mod asks for. Where Debian's is older, it fetches the right
# one itself, through the module proxy.
# shellcheck shell=bash

if ! command -v go >/dev/null 2>&1 && [ -x /usr/local/go/bin/go ]; then
  PATH=$PATH:/usr/local/go/bin
fi
if ! command -v go >/dev/null 2>&1; then
  echo "Go is not installed and could not be installed; see README.md" >&2
  exit 1
fi
go_wanted=$(awk '$1 == "go" { print $2 }' go.mod)
go_found=$(cd / && GOTOOLCHAIN=local go env GOVERSION | sed 's/^go//')
if [ "$(printf '%s\n%s\n' "$go_wanted" "$go_found" | sort -V | head -n 1)" != "$go_wanted" ]; then
  echo "using Go $go_wanted in place of $go_found" >&2
  export GOTOOLCHAIN=go$go_wanted
fi

#!/usr/bin/env bash
# Runs the tests against real services, which it installs and starts. A service
# that is missing is a failure, never a skipped test.
#
#   test.sh         every test, with the race detector
#   test.sh bench   every benchmark
#   test.sh fuzz    every fuzz target, FUZZTIME (10s) each
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

state=$(mktemp -d "${TMPDIR:-/tmp}/fencerider-test.XXXXXX")
stop() {
  deploy/services.sh stop "$state/services" || true
  rm -rf "$state"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

deploy/services.sh start "$state/services"
# shellcheck source=deploy/go.sh
. deploy/go.sh
# shellcheck disable=SC1091
. "$state/services/env"

case ${1:-test} in
  test)
    go vet ./...
    go test -race -shuffle=on -count=1 -p 2 -timeout 20m ./...
    ;;
  bench)
    go test -run '^$' -bench . -benchmem -p 1 ./...
    ;;
  fuzz)
    for pkg in $(go list ./...); do
      for target in $(go test -list '^Fuzz' "$pkg" | grep '^Fuzz' || true); do
        echo "== $pkg $target"
        go test -run '^$' -fuzz "^$target\$" -fuzztime "${FUZZTIME:-10s}" "$pkg"
      done
    done
    ;;
  *)
    echo "test: unknown command $1" >&2
    exit 2
    ;;
esac

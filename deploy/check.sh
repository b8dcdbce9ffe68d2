#!/usr/bin/env bash
# Formatting, linters, and that nothing which is generated is out of date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=deploy/go.sh
. deploy/go.sh

fail=0
note() { echo "check: $*" >&2; fail=1; }

unformatted=$(gofmt -l cmd config couch deploy e2e fence leaseclient proxy rabbit)
[ -z "$unformatted" ] || note "not formatted: $unformatted"

for tags in "" failpoint gateoff; do
  go vet -tags "$tags" ./... || note "go vet with tags '$tags'"
done

go mod tidy -diff >/dev/null || note "go.mod is not tidy; run go mod tidy"

go run ./cmd/fencerider config --table >/tmp/fencerider-table.$$
awk '/<!-- config:begin -->/{on=1;next} /<!-- config:end -->/{on=0} on' README.md >/tmp/fencerider-readme.$$
diff -q /tmp/fencerider-table.$$ /tmp/fencerider-readme.$$ >/dev/null || note "the table of settings in README.md is not that of the code"
rm -f /tmp/fencerider-table.$$ /tmp/fencerider-readme.$$

if command -v shellcheck >/dev/null; then
  shellcheck deploy/*.sh deploy/demo/run.sh .ci/run || note "shellcheck"
else
  [ "$(id -u)" = 0 ] && DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq install -y --no-install-recommends shellcheck >/dev/null &&
    { shellcheck deploy/*.sh deploy/demo/run.sh .ci/run || note "shellcheck"; }
fi

go tool -modfile=.tools/go.mod golangci-lint run ./... || note "golangci-lint"

exit $fail

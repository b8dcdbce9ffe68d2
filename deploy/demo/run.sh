#!/usr/bin/env bash
# The demo on real services.
#
#   run.sh up     install what is missing, start everything, tell the story
#   run.sh down   stop everything that `up` started
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
state=$PWD/.cache/demo

# end PIDFILE...: stops processes that the demo started, paused ones too.
end() {
  local f pid i
  for f in "$@"; do
    [ -e "$f" ] || continue
    pid=$(cat "$f")
    if [ -e "/proc/$pid/cmdline" ] && tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q fencerider; then
      kill "$pid" 2>/dev/null || true
      kill -CONT "$pid" 2>/dev/null || true
      for ((i = 0; i < 100; i++)); do
        [ -e "/proc/$pid/stat" ] || break
        sleep 0.1
      done
      kill -9 "$pid" 2>/dev/null || true
    fi
    rm -f "$f"
  done
}

down() {
  end "$state"/*.pid
  deploy/services.sh stop "$state/services"
  rm -rf "$state"
}

# need PROGRAM PACKAGE: installs a package when a program is missing.
need() {
  command -v "$1" >/dev/null 2>&1 && return 0
  [ "$(id -u)" = 0 ] || { echo "demo: installing $2 needs root" >&2; exit 1; }
  echo "demo: installing $2" >&2
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq install -y --no-install-recommends "$2" >/dev/null
}

up() {
  [ -e "$state" ] && down
  mkdir -p "$state"
  deploy/services.sh start "$state/services"
  need nc netcat-openbsd
  if ! /usr/bin/python3 -c 'import pika' 2>/dev/null; then
    [ "$(id -u)" = 0 ] || { echo "demo: installing python3-pika needs root" >&2; exit 1; }
    echo "demo: installing python3-pika" >&2
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq install -y --no-install-recommends python3-pika >/dev/null
  fi
  # shellcheck source=deploy/go.sh
  . deploy/go.sh
  echo "demo: building bin/fencerider" >&2
  go build -trimpath -o bin/fencerider ./cmd/fencerider
  # shellcheck disable=SC1091
  . "$state/services/env"
  /usr/bin/python3 deploy/demo/demo.py "$PWD/bin/fencerider" "$state"
}

case ${1:-} in
  up) up ;;
  down) down ;;
  *) sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac

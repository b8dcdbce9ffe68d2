#!/usr/bin/env bash
# Real services for the tests and the demo, on a bare Debian 12 or 13.
#
#   services.sh install      install what is missing (root)
#   services.sh start DIR    start Valkey, RabbitMQ and a CouchDB in DIR
#   services.sh env DIR      print the environment that tests read
#   services.sh status DIR   say what runs
#   services.sh stop DIR     stop all of it; nothing is left but DIR
#
# Every start takes free ports and keeps everything in DIR, so several can run
# side by side. Nothing listens anywhere but on 127.0.0.1.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

say() { printf 'services: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# missing PROGRAM...: true when one of them is not there.
missing() {
  local p
  for p in "$@"; do command -v "$p" >/dev/null 2>&1 || return 0; done
  return 1
}

apt() { DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq "$@"; }

# A package must not start a server of its own beside ours.
keep_quiet() {
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
  fi
}

# The mirror is the one this machine uses already.
mirror() {
  { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
      awk '$1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /^https?:/) { print $i; exit } }'
    cat /etc/apt/sources.list.d/*.sources 2>/dev/null | awk '$1 == "URIs:" { print $2; exit }'
  } | head -n 1
}

# A Go that can fetch the one that go.mod names.
install_go() {
  if ! missing go || [ -x /usr/local/go/bin/go ]; then return 0; fi
  say "installing Go"
  from_backports golang-go golang-src golang-1.23-go golang-1.23-src
}

# from_backports PACKAGE...: from backports on Debian 12, as it is elsewhere.
from_backports() {
  # shellcheck disable=SC1091
  case "$(. /etc/os-release && echo "${VERSION_CODENAME:-}")" in
    bookworm)
      local list
      list=$(mktemp --suffix=.list)
      echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(mirror) bookworm-backports main" >"$list"
      apt -o Dir::Etc::sourcelist="$list" update
      apt -o Dir::Etc::sourcelist="$list" install -y --no-install-recommends "${@/%//bookworm-backports}" >/dev/null
      rm -f "$list"
      ;;
    *) apt install -y --no-install-recommends "$1" ${2:+"$2"} >/dev/null ;;
  esac
}

install_valkey() {
  missing valkey-server valkey-cli || return 0
  say "installing Valkey"
  from_backports valkey-server valkey-tools
}

# couchdb_kind says which CouchDB there is, the most faithful first.
couchdb_kind() {
  if [ -n "${FENCERIDER_TEST_COUCHDB_URL:-}" ]; then echo url
  elif [ -x /opt/couchdb/bin/couchdb ]; then echo installed
  elif command -v docker >/dev/null 2>&1 && timeout 5 docker info >/dev/null 2>&1; then echo docker
  else echo pouchdb; fi
}

install_services() {
  local want=()
  missing curl && want+=(curl)
  missing openssl && want+=(openssl)
  missing rabbitmq-server && want+=(rabbitmq-server)
  missing gcc && want+=(gcc libc6-dev)
  [ -e /etc/ssl/certs/ca-certificates.crt ] || want+=(ca-certificates)
  [ "$(couchdb_kind)" = pouchdb ] && missing node npm && want+=(nodejs npm)
  if [ ${#want[@]} -gt 0 ] || missing valkey-server valkey-cli || { missing go && [ ! -x /usr/local/go/bin/go ]; }; then
    [ "$(id -u)" = 0 ] || die "installing ${want[*]} valkey needs root"
    keep_quiet
    say "updating package lists"
    apt update
  fi
  if [ ${#want[@]} -gt 0 ]; then
    say "installing ${want[*]}"
    apt install -y --no-install-recommends "${want[@]}" >/dev/null
  fi
  install_go
  install_valkey
  if [ "$(couchdb_kind)" = pouchdb ] && [ ! -e "$here/pouchdb/node_modules/.complete" ]; then
    say "installing PouchDB Server from npm"
    (cd "$here/pouchdb" && npm ci --omit=optional --no-audit --no-fund --loglevel=error >&2 && touch node_modules/.complete)
  fi
}

# free_port prints a port that nothing listens on. It is taken from a range below
# the one the kernel hands out, so that no client socket sits on it by chance.
free_port() {
  local p
  while :; do
    p=$((20000 + RANDOM % 10000))
    grep -qsx "$p" "$dir/ports" && continue
    if ! (exec 3<>"/dev/tcp/127.0.0.1/$p") 2>/dev/null; then
      echo "$p" | tee -a "$dir/ports"
      return
    fi
  done
}

# await WHAT SECONDS COMMAND...: polls until the command succeeds.
await() {
  local what=$1 tries=$(($2 * 10)) i
  shift 2
  for ((i = 0; i < tries; i++)); do
    "$@" >/dev/null 2>&1 && return 0
    sleep 0.1
  done
  die "$what did not come up; its log is in $dir"
}

# alive PIDFILE: the process is there and not a zombie.
alive() {
  local pid
  pid=$(cat "$1" 2>/dev/null) || return 1
  [ -n "$pid" ] && [ -e "/proc/$pid/stat" ] && ! grep -qs '^State:.Z' "/proc/$pid/status"
}

start_valkey() {
  local port password
  port=$(free_port)
  password=$(openssl rand -hex 16)
  mkdir -p "$dir/valkey"
  sed "s/@PASSWORD_SHA256@/$(printf %s "$password" | sha256sum | cut -d' ' -f1)/" "$here/valkey/users.acl" >"$dir/valkey/users.acl"
  local admin
  admin=$(openssl rand -hex 16)
  echo "user admin on #$(printf %s "$admin" | sha256sum | cut -d' ' -f1) ~* &* +@all" >>"$dir/valkey/users.acl"
  valkey-server "$here/valkey/valkey.conf" --bind 127.0.0.1 --port "$port" --dir "$dir/valkey" --aclfile "$dir/valkey/users.acl" \
    --daemonize yes --pidfile "$dir/valkey/pid" --logfile "$dir/valkey/log" >/dev/null
  await Valkey 10 valkey-cli -p "$port" --user admin --pass "$admin" --no-auth-warning ping
  {
    echo "export FENCERIDER_TEST_VALKEY_URL=valkey://fencerider:$password@127.0.0.1:$port"
    echo "export FENCERIDER_TEST_VALKEY_ADMIN_URL=valkey://admin:$admin@127.0.0.1:$port"
    echo "export FENCERIDER_TEST_VALKEY_SERVER=$(command -v valkey-server)"
  } >>"$dir/env"
  say "Valkey $(valkey-server --version | sed 's/.*v=\([0-9.]*\).*/\1/') on port $port"
}

# rabbit_env sets the environment of the private node; it has an epmd of its own.
rabbit_env() {
  local base=$dir/rabbitmq
  # shellcheck disable=SC1091
  . "$base/ports.env"
  export HOME=$base/home ERL_EPMD_PORT ERL_EPMD_ADDRESS=127.0.0.1 RABBITMQ_NODENAME=fencerider@localhost
  export RABBITMQ_NODE_IP_ADDRESS=127.0.0.1 RABBITMQ_NODE_PORT RABBITMQ_DIST_PORT LANG=C.UTF-8
  export RABBITMQ_MNESIA_BASE=$base/mnesia RABBITMQ_LOG_BASE=$base/log RABBITMQ_PID_FILE=$base/pid
  export RABBITMQ_ENABLED_PLUGINS_FILE=$base/enabled_plugins RABBITMQ_CONFIG_FILE=$base/rabbitmq.conf
  export RABBITMQ_CONF_ENV_FILE=/dev/null RABBITMQ_GENERATED_CONFIG_DIR=$base/gen RABBITMQ_FEATURE_FLAGS_FILE=$base/feature_flags
  # A node that is killed must not leave its last words in somebody else's directory.
  export ERL_CRASH_DUMP=$base/erl_crash.dump ERL_CRASH_DUMP_SECONDS=0
  export RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS="-kernel inet_dist_use_interface {127,0,0,1}"
  rabbit_sbin=$(echo /usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin)
  [ -x "$rabbit_sbin/rabbitmq-server" ] || die "no RabbitMQ under /usr/lib/rabbitmq"
}

start_rabbit() {
  local base=$dir/rabbitmq
  mkdir -p "$base"/{home,mnesia,log}
  printf 'RABBITMQ_NODE_PORT=%s\nRABBITMQ_DIST_PORT=%s\nERL_EPMD_PORT=%s\n' "$(free_port)" "$(free_port)" "$(free_port)" >"$base/ports.env"
  openssl rand -hex 16 | tr -d '\n' >"$base/home/.erlang.cookie"
  chmod 400 "$base/home/.erlang.cookie"
  echo '[].' >"$base/enabled_plugins"
  : >"$base/rabbitmq.conf"
  (
    rabbit_env
    setsid "$rabbit_sbin/rabbitmq-server" >"$base/out" 2>&1 </dev/null &
  )
}

await_rabbit() {
  local base=$dir/rabbitmq port
  (
    rabbit_env
    await RabbitMQ 90 "$rabbit_sbin/rabbitmqctl" -q await_startup
  )
  # shellcheck disable=SC1091
  port=$(. "$base/ports.env" && echo "$RABBITMQ_NODE_PORT")
  echo "export FENCERIDER_TEST_AMQP_URL=amqp://guest:guest@127.0.0.1:$port/" >>"$dir/env"
  say "RabbitMQ $(basename "$(echo /usr/lib/rabbitmq/lib/rabbitmq_server-*)" | sed 's/rabbitmq_server-//') on port $port"
}

start_couchdb() {
  local port password kind url
  kind=$(couchdb_kind)
  mkdir -p "$dir/couchdb"
  password=$(openssl rand -hex 16)
  case $kind in
    url)
      url=$FENCERIDER_TEST_COUCHDB_URL
      ;;
    installed)
      port=$(free_port)
      cp -r /opt/couchdb/etc "$dir/couchdb/etc"
      cat >"$dir/couchdb/etc/local.d/fencerider.ini" <<INI
[couchdb]
single_node = true
database_dir = $dir/couchdb/data
view_index_dir = $dir/couchdb/data
uri_file = $dir/couchdb/uri
[chttpd]
port = $port
bind_address = 127.0.0.1
[admins]
admin = $password
[log]
writer = file
file = $dir/couchdb/log
INI
      mkdir -p "$dir/couchdb/data"
      ERL_FLAGS="-couch_ini $dir/couchdb/etc/default.ini $dir/couchdb/etc/default.d $dir/couchdb/etc/local.ini $dir/couchdb/etc/local.d" \
        setsid /opt/couchdb/bin/couchdb >"$dir/couchdb/out" 2>&1 </dev/null &
      echo $! >"$dir/couchdb/pid"
      url=http://admin:$password@127.0.0.1:$port
      ;;
    docker)
      port=$(free_port)
      docker run -d --rm -p "127.0.0.1:$port:5984" -e COUCHDB_USER=admin -e COUCHDB_PASSWORD="$password" couchdb:3.5 >"$dir/couchdb/container"
      url=http://admin:$password@127.0.0.1:$port
      ;;
    pouchdb)
      port=$(free_port)
      (cd "$here/pouchdb" && exec setsid node server.js "$port" admin "$password" >"$dir/couchdb/log" 2>&1 </dev/null) &
      echo $! >"$dir/couchdb/pid"
      url=http://admin:$password@127.0.0.1:$port
      ;;
  esac
  await CouchDB 60 curl -sf "$url/_up"
  local name=couchdb
  [ "$kind" = pouchdb ] && name=pouchdb
  {
    echo "export FENCERIDER_TEST_COUCHDB_URL='$url'"
    echo "export FENCERIDER_TEST_COUCHDB_KIND=$name"
  } >>"$dir/env"
  case $kind in
    url) say "CouchDB: the one that FENCERIDER_TEST_COUCHDB_URL names" ;;
    installed) say "CouchDB: /opt/couchdb on port $port" ;;
    docker) say "CouchDB: container couchdb:3.5 on port $port" ;;
    pouchdb) say "CouchDB: none found, using PouchDB Server (same API) on port $port" ;;
  esac
}

start_services() {
  [ -e "$dir/env" ] && die "$dir is in use; stop it first"
  mkdir -p "$dir"
  chmod 700 "$dir"
  : >"$dir/ports"
  start_rabbit
  start_valkey
  start_couchdb
  await_rabbit
}

# kill_pid PIDFILE: asks, waits, insists.
kill_pid() {
  local pid i
  alive "$1" || return 0
  pid=$(cat "$1")
  kill "$pid" 2>/dev/null || true
  for ((i = 0; i < 100; i++)); do
    alive "$1" || return 0
    sleep 0.1
  done
  kill -9 "$pid" 2>/dev/null || true
}

stop_services() {
  [ -d "$dir" ] || return 0
  if [ -s "$dir/couchdb/container" ]; then docker stop "$(cat "$dir/couchdb/container")" >/dev/null || true; fi
  kill_pid "$dir/couchdb/pid"
  kill_pid "$dir/valkey/pid"
  if [ -e "$dir/rabbitmq/ports.env" ]; then
    (
      rabbit_env
      timeout 30 "$rabbit_sbin/rabbitmqctl" -q shutdown >/dev/null 2>&1 || kill_pid "$dir/rabbitmq/pid"
      epmd -kill >/dev/null 2>&1 || true
    )
    kill_pid "$dir/rabbitmq/pid"
  fi
  rm -f "$dir/env" "$dir/ports"
  say "stopped"
}

status_services() {
  local name
  [ -e "$dir/env" ] || { say "nothing was started in $dir"; return 1; }
  for name in valkey rabbitmq couchdb; do
    if alive "$dir/$name/pid"; then echo "$name: running"; elif [ -s "$dir/$name/container" ]; then echo "$name: container"; else echo "$name: not running"; fi
  done
}

command=${1:-}
dir=${2:-}
case $command in
  install) install_services ;;
  start | stop | status | env)
    [ -n "$dir" ] || die "$command needs a directory"
    mkdir -p "$(dirname "$dir")"
    dir=$(cd "$(dirname "$dir")" && pwd)/$(basename "$dir")
    case $command in
      start) install_services && start_services ;;
      stop) stop_services ;;
      status) status_services ;;
      env) cat "$dir/env" ;;
    esac
    ;;
  *) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac

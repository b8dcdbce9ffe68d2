"""Tells the story that Fencerider is for, on real services, and checks each
claim against what the stores hold. Exits with 1 when a claim does not hold.
"""

import base64
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import pika

BINARY, STATE = sys.argv[1], pathlib.Path(sys.argv[2])
HERE = pathlib.Path(__file__).parent
VALKEY, AMQP = os.environ["FENCERIDER_TEST_VALKEY_URL"], os.environ["FENCERIDER_TEST_AMQP_URL"]
COUCH = urllib.parse.urlsplit(os.environ["FENCERIDER_TEST_COUCHDB_URL"])
CREDENTIALS = f"{COUCH.username}:{COUCH.password}"
COUCH_BARE = f"{COUCH.scheme}://{COUCH.hostname}:{COUCH.port}"
DATABASE, QUEUE = "demo", "demo"
TTL = 3.0
BEGAN = time.monotonic()
failures = 0


def say(text):
    print(text, flush=True)


def tell(text):
    """One line of the timeline."""
    say(f"{time.monotonic() - BEGAN:6.1f} s  {text}")


def step(text):
    say("")
    tell(f"== {text}")


def claim(text, holds, detail=""):
    """Prints one verdict and remembers a failed one."""
    global failures
    if not holds:
        failures += 1
    tell(f"{'PASS' if holds else 'FAIL'}  {text}")
    if detail:
        say(f"                {detail}")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def couch(method, path, body=None):
    request = urllib.request.Request(f"{COUCH_BARE}{path}", data=body, method=method)
    request.add_header("Content-Type", "application/json")
    request.add_header("Authorization", "Basic " + base64.b64encode(CREDENTIALS.encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


class Sidecar:
    """A sidecar with a worker behind it and a reader of its events."""

    def __init__(self, name):
        self.name = name
        self.dir = STATE / name
        self.dir.mkdir()
        self.couch, self.amqp, self.admin = free_port(), free_port(), free_port()
        parts = urllib.parse.urlsplit(AMQP)
        self.amqp_url = f"amqp://{parts.username}:{parts.password}@127.0.0.1:{self.amqp}/"
        self.couch_url = f"http://127.0.0.1:{self.couch}/{DATABASE}"
        environment = dict(
            os.environ,
            FENCERIDER_VALKEY_URL=VALKEY, FENCERIDER_COUCHDB_URL=COUCH.geturl(), FENCERIDER_AMQP_URL=AMQP,
            FENCERIDER_COUCH_LISTEN=f"127.0.0.1:{self.couch}", FENCERIDER_AMQP_LISTEN=f"127.0.0.1:{self.amqp}",
            FENCERIDER_ADMIN_LISTEN=f"127.0.0.1:{self.admin}", FENCERIDER_SOCKET_DIR=str(self.dir),
            FENCERIDER_LEASE_TENANT_ID="tenant-main", FENCERIDER_LEASE_PROGRAM_ID="demo",
            FENCERIDER_LEASE_TARGET_NAMESPACE="demo", FENCERIDER_LEASE_TARGET_ID="target-1", FENCERIDER_LEASE_ACTOR_NAME="worker",
            FENCERIDER_LEASE_TTL=f"{TTL:g}s", FENCERIDER_LEASE_AGAIN="false", FENCERIDER_ARRIVAL_BOUND="2s",
        )
        log = open(self.dir / "log", "wb")
        self.process = subprocess.Popen([BINARY, "run"], env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        (STATE / f"{name}.pid").write_text(str(self.process.pid))
        self.wait_for_file(self.dir / "events.sock")
        self.events_file = open(self.dir / "events", "wb")
        self.events_reader = subprocess.Popen(["nc", "-U", str(self.dir / "events.sock")], stdout=self.events_file, stdin=subprocess.PIPE)
        self.worker = subprocess.Popen(
            ["/usr/bin/python3", str(HERE / "worker.py"), self.couch_url, CREDENTIALS, self.amqp_url, QUEUE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_for_file(self, path):
        limit = time.monotonic() + 30
        while not path.exists() and time.monotonic() < limit and self.process.poll() is None:
            time.sleep(0.05)

    def ready(self):
        """Asks the sidecar; returns whether it is ready and what it says."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/readyz", timeout=5) as answer:
                return True, json.load(answer)
        except urllib.error.HTTPError as error:
            return False, json.load(error)
        except OSError as error:
            return False, {"error": str(error)}

    def wait_ready(self):
        limit = time.monotonic() + 60
        while time.monotonic() < limit and self.process.poll() is None:
            if self.ready()[0]:
                return
            time.sleep(0.1)
        sys.exit(f"sidecar {self.name} does not get ready, its log is {self.dir / 'log'}")

    def job(self, line):
        self.worker.stdin.write(line + "\n")
        self.worker.stdin.flush()
        return json.loads(self.worker.stdout.readline())

    def pause(self):
        for p in (self.process, self.worker):
            p.send_signal(signal.SIGSTOP)

    def wake(self):
        for p in (self.process, self.worker):
            p.send_signal(signal.SIGCONT)

    def event(self, name):
        """Waits for an event, as the worker's own reader would see it."""
        limit = time.monotonic() + 10
        while time.monotonic() < limit:
            for line in (self.dir / "events").read_text().splitlines():
                event = json.loads(line)
                if event["event"] == name:
                    return event
            time.sleep(0.05)
        return None

    def stop_worker(self):
        self.worker.stdin.close()
        self.worker.wait(10)
        self.events_reader.kill()
        self.events_reader.wait()
        self.events_file.close()

    def stop(self):
        self.stop_worker()
        self.process.terminate()
        self.process.wait(40)
        (STATE / f"{self.name}.pid").unlink()


def main():
    step("A namespace in the lease store, a database, a queue")
    environment = dict(os.environ, FENCERIDER_VALKEY_URL=VALKEY, FENCERIDER_COUCHDB_URL=COUCH.geturl(), FENCERIDER_AMQP_URL=AMQP)
    subprocess.run([BINARY, "init"], env=environment, check=True)
    couch("PUT", f"/{DATABASE}")
    broker = pika.BlockingConnection(pika.URLParameters(AMQP))
    channel = broker.channel()
    channel.queue_declare(QUEUE, durable=True)

    step("Worker A holds the lease of target-1 and works")
    a = Sidecar("a")
    a.wait_ready()
    first = a.job("write report first draft by A")
    claim("A's document write goes through", first["ok"], first["reason"])
    claim("A's publish is confirmed", a.job("publish result 1 by A")["ok"])

    step("Worker B wants the same target")
    b = Sidecar("b")
    time.sleep(2)
    held, answer = b.ready()
    claim("B's sidecar runs and does not get the lease while A renews it", not held and {"name": "lease", "ok": False, "state": "not held"} in answer["checks"])
    refused = b.job("write report hasty draft by B")
    claim("a write by B is refused until it has the lease", not refused["ok"] and refused["status"] == 403, refused["reason"])

    step(f"A and its sidecar are paused, as by a long pause of the machine, for longer than the lease of {TTL:g} s")
    a.pause()
    b.wait_ready()
    tell("A's lease has run out, B has acquired it")
    second = b.job("write report second draft by B")
    claim("B's document write goes through", second["ok"], second["reason"])
    claim("B's publish is confirmed", b.job("publish result 2 by B")["ok"])

    step("A wakes up. It does not know that it has lost the lease, and goes on")
    a.wake()
    late = a.job("write report late draft by A")
    claim("A's late document write is refused with lease_lost", not late["ok"] and late["status"] == 403 and "lease_lost" in late["reason"], late["reason"])
    late = a.job("publish late result by A")
    claim("A's late publish is refused", not late["ok"], late["reason"])
    lost = a.event("lease_lost")
    claim("A was told over its event socket", lost is not None, json.dumps(lost and {k: lost[k] for k in ("event", "reason", "code")}))

    step("What the stores hold")
    _, report = couch("GET", f"/{DATABASE}/report")
    tell(f"CouchDB, document report: {json.dumps(report)}")
    messages = []
    while True:
        method, properties, body = channel.basic_get(QUEUE, auto_ack=True)
        if method is None:
            break
        messages.append((int(properties.headers["x-fence-fencing-token"]), body.decode()))
        tell(f"RabbitMQ, message of token {messages[-1][0]}: {messages[-1][1]}")
    tokens = [token for token, _ in messages]
    claim("the document is B's and carries B's higher fencing token", report["text"] == "second draft by B" and report["fence"]["fencing_token"] == 2)
    claim("nothing stale: no message of A behind one of B, no late result", tokens == sorted(tokens) and all("late" not in text for _, text in messages))
    claim("nothing lost: what was confirmed is there, once", messages == [(1, "result 1 by A"), (2, "result 2 by B")])

    a.stop()
    b.stop_worker()
    broker.close()
    step("Still running, for you to try (the lease of target-1 is held by B):")
    say(f"  CouchDB  through the sidecar  http://{CREDENTIALS}@127.0.0.1:{b.couch}/{DATABASE}")
    say(f"           directly             http://{CREDENTIALS}@{COUCH.hostname}:{COUCH.port}/{DATABASE}")
    say(f"  RabbitMQ through the sidecar  {b.amqp_url}")
    say(f"           directly             {AMQP}")
    say(f"  health and metrics            http://127.0.0.1:{b.admin}/readyz  /metrics")
    say(f"  events                        nc -U {b.dir}/events.sock")
    say(f"  leases                        curl --unix-socket {b.dir}/control.sock http://x/v1/status")
    say("  stop everything               make demo-down")
    say(f"\n{'all claims hold' if failures == 0 else f'{failures} claims do not hold'}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

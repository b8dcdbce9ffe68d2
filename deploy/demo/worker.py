"""A worker as people write them: it writes documents with curl and publishes with
pika, through two local addresses, and knows nothing of leases.

It reads one job a line, "write ID TEXT" or "publish TEXT", does it, and prints
what came of it as one line of JSON.
"""

import json
import subprocess
import sys

import pika


def curl(credentials, method, url, body=None):
    """One request; returns the status and the answer."""
    command = ["curl", "-s", "-S", "--max-time", "60", "-u", credentials, "-X", method, "-w", "\n%{http_code}", url]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    answer, _, status = out.rpartition("\n")
    return int(status), json.loads(answer)


def write(base, credentials, doc_id, text):
    """Writes a document the way every CouchDB client does: read, change, put."""
    status, doc = curl(credentials, "GET", f"{base}/{doc_id}")
    if status == 404:
        doc = {}
    doc["text"] = text
    status, answer = curl(credentials, "PUT", f"{base}/{doc_id}", doc)
    return {"ok": status in (200, 201), "status": status, "reason": answer.get("reason", "")}


class Publisher:
    """One connection, kept open as workers do."""

    def __init__(self, url, queue):
        self.url, self.queue, self.connection = url, queue, None

    def publish(self, text):
        try:
            if self.connection is None:
                self.connection = pika.BlockingConnection(pika.URLParameters(self.url))
                self.channel = self.connection.channel()
                self.channel.confirm_delivery()
            self.channel.basic_publish("", self.queue, text.encode())
            return {"ok": True}
        except pika.exceptions.NackError as error:
            returned = error.messages[0].method.reply_text if error.messages else ""
            return {"ok": False, "reason": returned}
        except pika.exceptions.AMQPError as error:
            self.connection = None
            return {"ok": False, "reason": str(error) or type(error).__name__}


def main():
    couch, credentials, amqp, queue = sys.argv[1:5]
    publisher = Publisher(amqp, queue)
    for line in sys.stdin:
        verb, _, rest = line.strip().partition(" ")
        if verb == "write":
            doc_id, _, text = rest.partition(" ")
            result = write(couch, credentials, doc_id, text)
        else:
            result = publisher.publish(rest)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

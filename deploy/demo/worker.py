"""A worker as people write them: it knows CouchDB's and RabbitMQ's ordinary
clients and two local addresses, and nothing of leases.

It reads one job a line, "write ID TEXT" or "publish TEXT", does it, and prints
what came of it as one line of JSON.
"""

import base64
import json
import sys
import urllib.error
import urllib.request

import pika


def write(base, credentials, doc_id, text):
    """Writes a document the way every CouchDB client does: read, change, put."""
    def call(method, body=None):
        request = urllib.request.Request(f"{base}/{doc_id}", data=body, method=method)
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", "Basic " + base64.b64encode(credentials.encode()).decode())
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    status, doc = call("GET")
    if status == 404:
        doc = {}
    doc["text"] = text
    status, answer = call("PUT", json.dumps(doc).encode())
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

"""A server that knows as much of the Redis protocol as a store of blocks needs, where none is installed."""

import contextlib
import socketserver
import threading


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(size + 2)[:-2])
            self.wfile.write(self.reply(words[0].upper(), words[1:]))

    def reply(self, command, words):
        values = self.server.values
        if command == b"MGET":
            return b"*%d\r\n" % len(words) + b"".join(map(bulk, map(values.get, words)))
        if command == b"MSET":
            values.update(zip(words[::2], words[1::2], strict=True))
        elif command == b"EVAL":  # `replace`
            _, _, key, before, after = words
            is_same = values.get(key, b"") == before
            values.update({key: after} if is_same else {})
            return b":%d\r\n" % is_same
        elif command == b"EXISTS":
            return b":%d\r\n" % sum(word in values for word in words)
        elif command == b"UNLINK":
            return b":%d\r\n" % sum(values.pop(word, None) is not None for word in words)
        elif command not in (b"CLIENT", b"SELECT"):
            return b"-ERR unknown command\r\n"
        return b"+OK\r\n"


def bulk(value):
    return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


@contextlib.contextmanager
def serving(path):
    """Serves at a unix socket."""
    with Server(str(path), Handler) as server:
        server.values = {}
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()

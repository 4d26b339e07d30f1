"""An HTTP server on this machine, with byte ranges and with faults on demand."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Web:
    """An HTTP server on this machine, with faults on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.status = 0  # answered to GET instead of the file, `times` times
        self.times = 0
        self.ranges = True
        self.short = 0  # bytes that each answer lacks of what its Content-Length promises
        self.etag: Callable[[], str] = lambda: '"one"'
        self.requests: list[tuple[str, str, int]] = []  # method, path, bytes sent
        web = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args, directory=str(web.folder))

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                if web.times > 0:
                    web.times -= 1
                    web.requests.append(("GET", self.path, 0))
                    self.send_error(web.status)
                elif self.path.endswith("/"):
                    super().do_GET()
                else:
                    self.answer(body=True)

            def answer(self, body: bool) -> None:
                path = Path(self.translate_path(self.path))
                if not path.is_file():
                    return self.send_error(404)
                data, part = path.read_bytes(), self.headers.get("Range") if web.ranges else None
                first, last = 0, len(data) - 1
                if part:
                    words = part.removeprefix("bytes=").split("-")
                    first, last = int(words[0]), min(last, int(words[1]))
                    if first >= len(data):
                        return self.send_error(416)
                self.send_response(206 if part else 200)
                self.send_header("Content-Length", str(last + 1 - first))
                self.send_header("ETag", web.etag())
                if part:
                    self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
                self.end_headers()
                sent = data[first : last + 1 - web.short] if body else b""
                web.requests.append((self.command, self.path, len(sent)))
                try:
                    self.wfile.write(sent)
                except ConnectionError:
                    return None  # the client has seen enough
                return None

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 256  # a connection that finds no room waits a second or more

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def gets(self) -> int:
        return sum(method == "GET" for method, _, _ in self.requests)

    @property
    def bytes_sent(self) -> int:
        return sum(sent for _, _, sent in self.requests)


@contextmanager
def serving(folder: Path) -> Iterator[Web]:
    """The server, over the files of a folder, until the block ends."""
    web = Web(folder)
    thread = threading.Thread(target=web.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield web
    finally:
        web.server.shutdown()
        thread.join()
        web.server.server_close()

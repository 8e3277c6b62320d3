"""HTTP/2 in cleartext for the replay server.

The AWS SDK in kclpy's daemon sends the HTTP/2 preface to Kinesis without an upgrade. The library h2
implements the protocol.
"""

from __future__ import annotations

from collections.abc import Callable

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, RequestReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes, Settings

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES = 16_384
MAX_STREAMS = 256

Answer = Callable[[str, dict[str, str], bytes], tuple[str, bytes | memoryview]]
"""Function from path, headers and body of a request to content type and body of the response."""


class Http2Connection:
    """One HTTP/2 connection.

    A response is sent as far as the client's flow-control windows permit. The rest follows when the
    windows open.
    """

    def __init__(self, sendall: Callable[[bytes], object], answer: Answer) -> None:
        self.sendall = sendall
        self.answer = answer
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.h2.local_settings = Settings(
            client=False, initial_values={SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS}
        )
        self.requests: dict[int, tuple[dict[str, str], bytearray]] = {}
        self.unsent: dict[int, memoryview] = {}
        self.h2.initiate_connection()

    def data_received(self, data: bytes) -> None:
        """Process received data and send what can be sent."""
        for event in self.h2.receive_data(data):
            self.on(event)
        for stream in list(self.unsent):
            self.send(stream)
        self.flush()

    def on(self, event: Event) -> None:
        """Process one event; a complete request gets its response."""
        if isinstance(event, RequestReceived):
            self.requests[event.stream_id] = (
                {str(name): str(value) for name, value in event.headers},
                bytearray(),
            )
        elif isinstance(event, DataReceived):
            self.requests[event.stream_id][1].extend(event.data)
            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded):
            headers, body = self.requests.pop(event.stream_id)
            kind, answer = self.answer(headers[":path"], headers, bytes(body))
            self.h2.send_headers(
                event.stream_id,
                [(":status", "200"), ("content-type", kind), ("x-amzn-requestid", "0")],
            )
            self.unsent[event.stream_id] = memoryview(bytes(answer))
        elif isinstance(event, StreamReset):
            self.requests.pop(event.stream_id, None)
            self.unsent.pop(event.stream_id, None)

    def send(self, stream: int) -> None:
        """Send as much of a response as the windows of its stream and of the connection permit."""
        body = self.unsent[stream]
        while (
            body
            and (
                size := min(
                    self.h2.local_flow_control_window(stream),
                    self.h2.max_outbound_frame_size,
                    FRAME_BYTES,
                    len(body),
                )
            )
            > 0
        ):
            self.h2.send_data(stream, bytes(body[:size]))
            body = body[size:]
        if body:
            self.unsent[stream] = body
            return
        self.h2.end_stream(stream)
        del self.unsent[stream]

    def flush(self) -> None:
        """Send the bytes that h2 has buffered."""
        if data := self.h2.data_to_send():
            self.sendall(data)

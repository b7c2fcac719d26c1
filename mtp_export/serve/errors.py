"""Errors of the server, as OpenAI's clients read them."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import JSONResponse

from mtp_checkpoints.errors import MAX_MESSAGE

INVALID = "invalid_request_error"
_MAX_PARAM = 200  # characters; a client may make up any


@dataclass(eq=False)
class ApiError(Exception):
    """Refusal or failure of one request: HTTP status, and the fields of its body."""

    status: int
    message: str
    kind: str = INVALID
    param: str | None = None
    code: str | None = None

    def body(self) -> dict[str, object]:
        """Return the body of the response, or of a chunk where a stream is under way."""
        return {
            "error": {
                "message": self.message[:MAX_MESSAGE],
                "type": self.kind,
                "param": self.param and self.param[:_MAX_PARAM],
                "code": self.code or self.status,
            }
        }

    def response(self) -> JSONResponse:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}
        return JSONResponse(self.body(), self.status, headers.get(self.status))


def unavailable(message: str) -> ApiError:
    """Return the refusal of a server that takes no request now."""
    return ApiError(503, message, kind="server_error")

"""Errors in OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse

from quire.errors import ApiError, QuireError

ENGINE_FAILED = "engine_failed"

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def content(problem: ApiError) -> dict[str, Any]:
    """Return the body of an error."""
    return {
        "error": {
            "message": str(problem),
            "type": KINDS.get(problem.status, "api_error"),
            "param": problem.param,
            "code": problem.code,
        }
    }


def response(problem: ApiError) -> JSONResponse:
    """Return the response to a request that has failed."""
    headers = {"www-authenticate": "Bearer"} if problem.status == 401 else {}
    if problem.retry_after is not None:
        headers["retry-after"] = str(problem.retry_after)
    return JSONResponse(content(problem), problem.status, headers)


def event(problem: ApiError) -> bytes:
    """Return an error that ends a stream."""
    return b"data: " + json.dumps(content(problem)).encode() + b"\n\n"


def shutdown() -> ApiError:
    """Return the error of an answer that is not complete when the server ends."""
    return ApiError("the server ends, and the answer with it.", status=503, code="shutdown")


def engine_failed() -> ApiError:
    """Return the error of an answer whose engine computes no more."""
    return ApiError(
        "the engine that wrote the answer has failed. Ask again.", status=503, code=ENGINE_FAILED
    )


def code_of(body: bytes) -> str | None:
    """Return the code of an error, from its body."""
    try:
        code: str | None = json.loads(body)["error"]["code"]
    except (ValueError, TypeError, KeyError):
        return None
    return code


def of_request(error: QuireError, param: str | None = None) -> ApiError:
    """Return the error of a request that the engine refuses: its message has the numbers."""
    too_long = type(error).__name__ == "RequestTooLong"
    code = "context_length_exceeded" if too_long else "invalid_value"
    return ApiError(str(error), status=400, code=code, param=param)

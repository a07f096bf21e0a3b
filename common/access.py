"""Who may call which gRPC method: bearer tokens with roles, and the token that processes of the cluster show each other.

client < operator < internal: a token of a higher role may do all that a lower one may. Health is open to everybody, for probes.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.errors import ConfigError
from common.keyring import Keyring
from common.watched import Watched, read_file

AUTHORIZATION = "authorization"
_OPEN = ("/grpc.health.v1.Health/",)


class Role(enum.IntEnum):
    CLIENT = 1
    OPERATOR = 2
    INTERNAL = 3


class TokenEntry(BaseModel):
    """One line of the tokens file: the token itself, or its SHA-256 in hex so that the file holds no secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
    token: str | None = Field(default=None, min_length=16)
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    name: str = ""
    role: str = Field(default="client", pattern="^(client|operator)$")

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenEntry:
        if (self.token is None) == (self.sha256 is None):
            raise ValueError("give either token or sha256")
        return self

    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256) if self.sha256 else hashlib.sha256((self.token or "").encode()).digest()


class Tokens:
    """Tokens of clients and operators from a YAML file that is followed, and the cluster's own.

    `file` None: only the cluster's own are known. Raises: ConfigError naming the entry, never with a token in its text
    """

    def __init__(self, file: Path | None, ring: Keyring):
        self._book = Watched([file], lambda: _load(file)) if file is not None else None
        self._ring = ring

    def role_of(self, authorization: str) -> Role | None:
        """None: no token or an unknown one."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            return None
        found = self._book.get().get(hashlib.sha256(token.encode()).digest()) if self._book else None  # of digests: timing tells nothing
        if found is not None:
            return found
        return Role.INTERNAL if any(hmac.compare_digest(token.encode(), own.encode()) for own in self._ring.tokens()) else None


class Guard(grpc.aio.ServerInterceptor):
    """Refuses calls without a token (UNAUTHENTICATED) or with one of too low a role (PERMISSION_DENIED), before anything is parsed.

    `needs(method)`: the role for a full method name, /package.Service/Method
    """

    def __init__(self, tokens: Tokens, needs: Callable[[str], Role]):
        self._tokens = tokens
        self._needs = needs

    async def intercept_service(self, continuation, handler_call_details):
        method = handler_call_details.method
        if method.startswith(_OPEN):
            return await continuation(handler_call_details)
        header = next((str(value) for key, value in handler_call_details.invocation_metadata if key == AUTHORIZATION), "")
        role, needed = self._tokens.role_of(header), self._needs(method)
        if role is not None and role >= needed:
            return await continuation(handler_call_details)
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if role is None:
            return _denying(handler, grpc.StatusCode.UNAUTHENTICATED, "no known token; send the metadata `authorization: Bearer TOKEN`")
        return _denying(handler, grpc.StatusCode.PERMISSION_DENIED, f"{method} needs the role {needed.name.lower()}")


def needs_of(roles: Mapping[str, Role], otherwise: Role) -> Callable[[str], Role]:
    """`roles` by the bare name of the method."""
    return lambda method: roles.get(method.rpartition("/")[2], otherwise)


def _denying(handler: grpc.RpcMethodHandler, code: grpc.StatusCode, message: str) -> grpc.RpcMethodHandler:
    """A handler of the same arity that ends the call."""

    async def refuse(_, context: grpc.aio.ServicerContext):
        await context.abort(code, message)

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(refuse)


def _load(file: Path) -> dict[bytes, Role]:
    try:
        tree = yaml.safe_load(read_file(file, "tokens file"))
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"tokens file {file} is not valid YAML") from None
    if not isinstance(tree, list):
        raise ConfigError(f"tokens file {file} must be a list of entries like {{token: ..., name: ..., role: client}}")
    book = {}
    for number, item in enumerate(tree):
        try:
            entry = TokenEntry.model_validate(item)
        except ValidationError as exc:
            first = exc.errors(include_input=False)[0]
            raise ConfigError(f"tokens file {file}, entry {number}: {'.'.join(map(str, first['loc']))} {first['msg']}") from None
        book[entry.digest()] = Role[entry.role.upper()]
    return book

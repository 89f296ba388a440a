"""How a bucket's server is reached: its address, proxy and certificates, and whose requests they are.

Credentials are looked for where the AWS tools look: variables, the pod's web identity, a credentials file, the
container's endpoint, the instance's role. With none of them requests have no signature, as a public bucket allows.
"""

from __future__ import annotations

import configparser
import os
import re
import ssl
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree.ElementTree import ParseError

from minio import Minio
from minio.credentials.credentials import Credentials
from minio.credentials.providers import AWSConfigProvider, IamAwsProvider, Provider, StaticProvider
from urllib3 import PoolManager, ProxyManager, Timeout
from urllib3.exceptions import HTTPError
from urllib3.util import make_headers

from reprise_engine.errors import ConfigError, ModelFetchDenied
from reprise_engine.fetch.web import CONNECT_SECONDS, SILENCE_SECONDS, Transient
from reprise_engine.version import __version__

ADDRESSING_VARIABLE = "REPRISE_S3_ADDRESSING"
METADATA_SECONDS = 1.0
"""Most pods run where there is no instance metadata, and nothing answers there."""
_ADDRESSING = ("auto", "path", "virtual")
_REGION_IN_HOST = re.compile(r"(?:^|\.)s3[.-](?:dualstack\.)?([a-z]{2}(?:-[a-z]+)+-\d+)\.(?:.+\.)?amazonaws\.com")
_STATUS = re.compile(r"HTTP status code (\d{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where buckets are. `addressing`: whether the bucket is in the path or in the host name; auto: as is usual."""

    secure: bool
    host: str
    """With its port where that is not the scheme's own."""
    region: str
    addressing: str


def read_server(environment: Mapping[str, str]) -> Server:
    """The server that the variables name, AWS without any. Raises ConfigError."""
    addressing = environment.get(ADDRESSING_VARIABLE) or "auto"
    if addressing not in _ADDRESSING:
        raise ConfigError(f"${ADDRESSING_VARIABLE} is {addressing!r}; it must be one of {', '.join(_ADDRESSING)}.")
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    name = "AWS_ENDPOINT_URL_S3" if environment.get("AWS_ENDPOINT_URL_S3") else "AWS_ENDPOINT_URL"
    endpoint = environment.get(name)
    if not endpoint:
        region = region or "us-east-1"
        domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        return _checked(Server(secure=True, host=f"s3.{region}.{domain}", region=region, addressing=addressing))
    scheme, host = _split(name, endpoint)
    in_host = _REGION_IN_HOST.search(host)
    region = region or (in_host[1] if in_host else "us-east-1")
    return _checked(Server(secure=scheme == "https", host=host, region=region, addressing=addressing))


def _split(name: str, endpoint: str) -> tuple[str, str]:
    try:
        url = urlsplit(endpoint)
        parts = (url.username, url.password, url.path.strip("/"), url.query, url.fragment)
        if url.scheme in ("http", "https") and url.hostname and url.port != 0 and not any(parts):
            return url.scheme, url.netloc
    except ValueError:
        pass
    shown = "not an address" if "@" in endpoint else repr(endpoint)  # what is before an @ may be secret
    raise ConfigError(f"${name} is {shown}; it must be http(s)://host[:port], without a path.")


def _checked(server: Server) -> Server:
    try:
        Minio(server.host, secure=server.secure, region=server.region)
    except ValueError as error:
        raise ConfigError(
            f"the S3 server {server.host} in region {server.region!r}: {error}. Check $AWS_ENDPOINT_URL and "
            "$AWS_REGION."
        ) from error
    return server


def connect(server: Server, environment: Mapping[str, str]) -> Minio:
    """A client for `server`. Asks the instance's metadata for a role where no other credentials are named.

    Raises ConfigError, ModelFetchDenied.
    """
    client = Minio(
        server.host,
        secure=server.secure,
        region=server.region,
        http_client=_pool(f"{'https' if server.secure else 'http'}://{server.host}", environment),
        credentials=_credentials(environment),
    )
    client.set_app_info("reprise-fetch", __version__)
    if server.addressing == "virtual":
        client.enable_virtual_style_endpoint()  # type: ignore[no-untyped-call]  # the SDK's gap
    elif server.addressing == "path":
        client.disable_virtual_style_endpoint()  # type: ignore[no-untyped-call]  # the SDK's gap
    return client


def _pool(url: str, environment: Mapping[str, str]) -> PoolManager:
    """Connections to `url`, through the proxy that is set for it. Nothing is tried twice: run.py does that."""
    target = urlsplit(url)
    options: dict[str, Any] = {
        "timeout": Timeout(connect=CONNECT_SECONDS, read=SILENCE_SECONDS),
        "retries": False,
    }
    if target.scheme == "https":
        bundle = environment.get("AWS_CA_BUNDLE") or None
        try:
            # Without a bundle what the connections of the files trust, $SSL_CERT_FILE included.
            options["ssl_context"] = ssl.create_default_context(cafile=bundle)
        except OSError as error:
            raise ConfigError(f"$AWS_CA_BUNDLE is {bundle!r}, which cannot be read: {error}.") from error
    proxy = urllib.request.getproxies().get(target.scheme)
    if not proxy or urllib.request.proxy_bypass(target.hostname or ""):
        return PoolManager(**options)
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        options["proxy_headers"] = make_headers(proxy_basic_auth=login)
    return ProxyManager(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", **options)


def _credentials(environment: Mapping[str, str]) -> Provider | None:
    """None where there are none: then nothing is signed."""
    key, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if key and secret:
        return StaticProvider(key, secret, environment.get("AWS_SESSION_TOKEN") or None)
    if key or secret:
        there, missing = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"
        if not key:
            there, missing = missing, there
        raise ModelFetchDenied(
            f"${there} is set, but ${missing} is not. Check the keys of the Secret in spec.model.secretRef."
        )
    if environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        endpoint = environment.get("AWS_ENDPOINT_URL_STS") or environment.get("AWS_ENDPOINT_URL") or None
        pool = _pool(endpoint or "https://sts.amazonaws.com", environment)
        return _Identity("the pod's web identity", IamAwsProvider(custom_endpoint=endpoint, http_client=pool))
    return _from_file(environment) or _from_endpoint(environment)


def _from_file(environment: Mapping[str, str]) -> Provider | None:
    path = environment.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
    profile = environment.get("AWS_PROFILE") or None
    if not Path(path).is_file():
        return None
    provider = AWSConfigProvider(filename=path, profile=profile)
    try:
        provider.retrieve()
    except (ValueError, configparser.Error):
        if profile is None:
            return None
        raise ModelFetchDenied(
            f"{path} holds no keys of the profile {profile!r}. Check $AWS_PROFILE and the file."
        ) from None
    return provider


def _from_endpoint(environment: Mapping[str, str]) -> Provider | None:
    """What the container's endpoint gives or, if it answers, the instance's: both are near, never behind a proxy."""
    if environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") or environment.get(
        "AWS_CONTAINER_CREDENTIALS_FULL_URI"
    ):
        pool = PoolManager(timeout=Timeout(connect=CONNECT_SECONDS, read=SILENCE_SECONDS), retries=False)
        return _Identity("the pod's identity", IamAwsProvider(http_client=pool))
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    endpoint = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").rstrip("/") or None
    pool = PoolManager(timeout=Timeout(connect=METADATA_SECONDS, read=METADATA_SECONDS), retries=False)
    role = _Identity("the instance's role", IamAwsProvider(custom_endpoint=endpoint, http_client=pool))
    try:
        role.retrieve()
    except (Transient, ModelFetchDenied):
        return None
    return role


class _Identity(Provider):
    """Credentials that a server lends. Its errors hold links with tokens, so none of their words are passed on."""

    def __init__(self, name: str, provider: Provider) -> None:
        self._name = name
        self._provider = provider

    def retrieve(self) -> Credentials:
        try:
            return self._provider.retrieve()
        except HTTPError as error:
            raise Transient(f"{self._name}: {type(error).__name__}") from None
        except (ValueError, KeyError, OSError, ParseError) as error:
            status = _STATUS.search(str(error))
            if status and (status[1] == "429" or status[1] >= "500"):
                raise Transient(f"{self._name}: HTTP {status[1]}") from None
            words = f"HTTP {status[1]}" if status else type(error).__name__
            raise ModelFetchDenied(
                f"{self._name} gave no credentials ({words}). Check the role that the service account is bound to, or "
                "name a Secret with keys in spec.model.secretRef."
            ) from None

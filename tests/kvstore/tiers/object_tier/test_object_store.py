"""Valid and invalid values of --object-url."""

from __future__ import annotations

import pytest

from pillion.errors import ConfigError
from pillion.kvstore.tiers.object_tier.object_store import BucketLocation, parse_object_url


def test_urls_name_a_bucket() -> None:
    assert parse_object_url("s3://b") == BucketLocation(bucket="b", prefix="")
    said = "s3://b/some/where/?endpoint=https://s3.example:9000/&region=eu-1&virtual_hosted_style=true"
    place = parse_object_url(said)
    assert place == BucketLocation(
        bucket="b", prefix="some/where", endpoint="https://s3.example:9000", region="eu-1", virtual_hosted_style=True
    )
    assert str(place) == "s3://b/some/where"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "does not begin with s3://BUCKET"),
        ("/some/folder", "does not begin with s3://BUCKET"),
        ("gs://bucket/x", "does not begin with s3://BUCKET"),
        ("s3:///x", "does not begin with s3://BUCKET"),
        ("s3://id:hidden@bucket/x", "credentials and ports do not belong there"),
        ("s3://bucket:9000/x", "credentials and ports do not belong there"),
        ("s3://bucket?secret_access_key=hidden", "secret_access_key is not one of endpoint, region"),
        ("s3://bucket?endpoint=s3.example", "does not begin with http:// or https://"),
        ("s3://bucket?endpoint=", "does not begin with http:// or https://"),
        ("s3://bucket?virtual_hosted_style=yes", "is true or false"),
        ("s3://bucket?endpoint", "is not a URL"),
        ("s3://[bucket", "is not a URL"),
    ],
)
def test_other_urls_are_rejected_and_secrets_not_repeated(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_object_url(url)
    assert "hidden" not in caught.value.message

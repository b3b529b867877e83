"""What looks like a secret is recorded nowhere, and what doesn't is kept."""

from __future__ import annotations

import pytest

from accelerate.guests.reproduce.masking import is_secret_name, masked, masked_arguments, secret_line

SECRET_NAMES = [
    *("HF_TOKEN", "hf_token", "hfToken", "--hf-token", "token", "WANDB_API_KEY", "apiKey", "apikey", "OPENAI_KEY"),
    *("AWS_SECRET_ACCESS_KEY", "aws_secret", "client.secret", "SECRET_SAUCE", "password", "DB_PASSWORD", "db-passwd"),
    *("passphrase", "ssh_key", "privateKey", "credentials", "GOOGLE_CREDENTIAL", "authorization", "basic_auth"),
    *("API_KEY_2", "session_cookie", "SENTRY_DSN", "accesstoken", "mypassword", "pwd"),
]
PLAIN_NAMES = [
    *("tokenizer", "max_tokens", "num_tokens", "token_budget", "key_value_heads", "keyboard", "monkey", "secretary"),
    *("learning_rate", "OMP_NUM_THREADS", "author", "authority", "passes", "compass", "keep_every", "seed", ""),
]
#: Texts without a telling name -> what is recorded of them.
VALUES = {
    "hf_abcdefghijklmnop1234": "***",
    "sk-proj-0123456789abcdefghij": "***",
    "ghp_0123456789abcdefghijABCDEFGHIJ123456": "***",
    "github_pat_11ABCDEFG0aBcDeFgHiJkL_mnopqrstuv": "***",
    "glpat-abcdefGHIJKL12345678": "***",
    "xoxb-123456789012-abcdefghij": "***",
    "AKIAIOSFODNN7EXAMPLE": "***",
    "AIzaSyA1234567890abcdefghijklmnopqrstuv": "***",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def": "***",
    "Bearer abc": "***",
    "0123456789abcdef0123456789abcdef01234567": "***",
    "https://me:word@host/path": "https://***@host/path",
    "s3://AKIAIOSFODNN7EXAMPLE@bucket": "s3://***@bucket",
    "https://host/path?token=abc&page=2": "https://host/path?token=***&page=2",
    "api_key=abc": "api_key=***",
    '{"api_key": "abc", "lr": 0.1}': '{"api_key": "***", "lr": 0.1}',
    "model.hub_token=abc": "model.hub_token=***",
    "password: abc": "password: ***",
    # kept as they are
    "gpt2": "gpt2",
    "runs/2026-11-28/lr0.001_batch64_seed42": "runs/2026-11-28/lr0.001_batch64_seed42",
    "/data/imagenet/train": "/data/imagenet/train",
    "https://example.com/data.csv": "https://example.com/data.csv",
    "sk-learn-tutorial-of-trees": "sk-learn-tutorial-of-trees",
    "optimizer.lr=3e-4": "optimizer.lr=3e-4",
    "max_tokens=512": "max_tokens=512",
    "thelongestwordswithoutanydigitsareonlywords": "thelongestwordswithoutanydigitsareonlywords",
    "12345678901234567890123456789012": "12345678901234567890123456789012",
}
ARGUMENTS = [
    (["train.py", "--api_key", "abc", "--lr", "0.1"], ["train.py", "--api_key", "***", "--lr", "0.1"]),
    (["train.py", "--api-key=abc"], ["train.py", "--api-key=***"]),
    (["train.py", "--hf_token", "--verbose", "x"], ["train.py", "--hf_token", "--verbose", "x"]),
    (["train.py", "token=abc", "lr=1"], ["train.py", "token=***", "lr=1"]),
    (["train.py", "--tokenizer", "gpt2"], ["train.py", "--tokenizer", "gpt2"]),
    (["train.py", "hf_abcdefghijklmnop1234"], ["train.py", "***"]),
]
SOURCES = [
    ('x = 1\napi_key = "abcdef"\n', 2),
    ('login(token="hf_abcdefghijklmnop1234")\n', 1),
    ("headers = {'Authorization': 'Basic abcd'}\n", 1),
    ('url = "postgres://me:word@host/db"\n', 1),
    ("sorted(items, key=len)\ntoken = tokens[0]\npassword = read('PASSWORD')\n", None),
    ("def f(tokenizer, key=None):\n    return tokenizer\n", None),
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_the_name_of_a_secret_is_known(name: str) -> None:
    assert is_secret_name(name)
    assert masked("any value at all", name) == "***"


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_another_name_is_none(name: str) -> None:
    assert not is_secret_name(name)
    assert masked("value", name) == "value"


@pytest.mark.parametrize(("text", "shown"), VALUES.items())
def test_a_value_is_masked_where_it_looks_like_a_secret(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.mark.parametrize(("arguments", "shown"), ARGUMENTS)
def test_arguments_lose_their_secrets_only(arguments: list[str], shown: list[str]) -> None:
    assert masked_arguments(arguments) == shown


@pytest.mark.parametrize(("source", "line"), SOURCES)
def test_a_source_with_a_secret_is_known_by_its_line(source: str, line: int | None) -> None:
    assert secret_line(source) == line

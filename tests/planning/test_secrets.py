"""What is taken for a secret, and what is not."""

from __future__ import annotations

import pytest

from nbtrain.planning.secrets import (
    has_secret,
    is_secret,
    mask_source,
    mask_text,
    move_secrets_to_environment,
)

SECRET = {
    "password": "x1",
    "db_passwd": "hunter2",
    "auth": "me:you",
    "openai_key": "a1b2c3d4e5f6a7b8",
    "openaiApiKey": "a1b2c3d4e5",
    "WANDB_API_KEY": "0123456789abcdef",
    "token": "abcdefghi",
    "database": "postgresql://me:pa55@db.example/x",
    "url": "https://example.com/x?api_key=0123456789",
    "anything": "hf_0123456789abcdefghij",
    "note": "use sk-proj-0123456789abcdefghij here",
    "pem": "-----BEGIN RSA PRIVATE KEY-----\nMIIE",
    "header": "Bearer abcdefghijklmnop",
    "jwt": "eyJhbGciOiJI.eyJzdWIiOiIx.sig",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "dbpassword": "abc",
    "API_KEY": "abc12345",
    "link": "https://bucket.example/x?X-Amz-Signature=0123456789abcdef",
    "db_password": 123456,
    "command": "psql --password=hunter2 -h db",
    "raw": b"ghp_0123456789abcdefghij",
}

NONE = {
    "pad_token": "<pad>",
    "additional_special_tokens": "abcdefghijkl",
    "max_tokens": 512,
    "token": "[MASK]",
    "tokenizer": "a-name-of-one-more",
    "label_key": "labels",
    "model_name": "bert-base-uncased",
    "url": "https://example.com/data?split=train",
    "password": "",
    "secret": None,
    "cache": "/data/hf_datasets_cache_2024",
    "estimator": "sk-learn-random-forest-baseline",
    "tokens_path": "/data/tokens.bin",
    "tokens": "openwebtext",
    "image_key": "observation.images.cam_1",
    "forward_pass": "both",
    "auth": "none",
    "secret_count": 3,
    "path": "/home/me/skeleton-0123456789abcdef",
}


@pytest.mark.parametrize(("name", "value"), SECRET.items())
def test_a_secret_is_known_by_its_name_or_its_shape(name: str, value: object) -> None:
    assert is_secret(name, value)


@pytest.mark.parametrize(("name", "value"), NONE.items())
def test_what_a_training_is_given_every_day_is_none(name: str, value: object) -> None:
    assert not is_secret(name, value)


@pytest.mark.parametrize(
    ("source", "masked"),
    [
        (
            "x = {'api_key': 'abc12345', \"lr\": 1}",
            "x = {'api_key': os.environ['API_KEY'], \"lr\": 1}",
        ),
        (
            'os.environ["HF_TOKEN"] = "abcdefghi"',
            "os.environ[\"HF_TOKEN\"] = os.environ['HF_TOKEN']",
        ),
        ("f(1, 'hf_0123456789abcdefghij')", "f(1, os.environ['SECRET'])"),
        ("login(password='x')", "login(password=os.environ['PASSWORD'])"),
        ("é = 'é'; pwd = (b'a'\n b'b')", "é = 'é'; pwd = (os.environ['PASSWORD'].encode())"),
        ("add('--password', default='x')", "add('--password', default=os.environ['PASSWORD'])"),
        ("passwords = {'alice': 'x'}", "passwords = {'alice': os.environ['PASSWORDS']}"),
        ("x = dict([('passwd', 'x')])", "x = dict([('passwd', os.environ['PASSWD'])])"),
        ("u = f'db://{me}:hunter2@{host}'", "u = os.environ['U']"),
    ],
)
def test_a_source_takes_its_secrets_from_the_environment(source: str, masked: str) -> None:
    found, secrets = move_secrets_to_environment(source)
    assert found == masked
    assert len(secrets) == 1


@pytest.mark.parametrize(
    "source",
    [
        "pad_token = '<pad>'",
        "x = f'{y} password' + 'b'",
        "password = getpass('Password: ')",
        "token = userdata.get('HF_TOKEN')",
        "header = {'Authorization': f'{kind} {key}'}",
        "url = f'db://{me}:{password}@{host}'",
        "print('password', 'is wrong')",
        "high_pass = 8000; tokens_per_pass = 65536; cookies = 5000",
        "x = 'π'  # the tokens of BERT, see arXiv:1810.04805",
    ],
)
def test_a_source_without_secrets_stays_as_it_is(source: str) -> None:
    assert move_secrets_to_environment(source) == (source, set())


def test_a_line_of_a_shell_may_have_a_secret() -> None:
    assert has_secret("%env API_KEY=abcdefgh12")
    assert has_secret("!login hf_0123456789abcdefghij")
    assert not has_secret("!pip install -q accelerate")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at http://me:hunter2@host:5000/api: refused", "at http://…@host:5000/api: refused"),
        ("{'password': 'hunter2', 'n': 1}", "{'password': '…', 'n': 1}"),
        ("GET /x?api_key=hunter2x&n=1", "GET /x?api_key=…&n=1"),
        ("Authorization: Bearer hunter2hunter2==", "Authorization: …"),
        ("-----BEGIN PRIVATE KEY-----\nhunter2=\n-----END PRIVATE KEY----- x", "… x"),
        ("the password is hunter2", "the password is …"),
        ("at http://a0b1c2d3e4f5@host", "at http://…@host"),
        ("Invalid API key 'hunter2hunter2'", "Invalid API key '…'"),
        ("pass 12 of 30 at http://localhost:5000/runs/1", None),
        ("the password must not be empty", None),
    ],
)
def test_a_text_of_others_is_shown_without_secrets(text: str, shown: str | None) -> None:
    assert mask_text(text) == (shown or text)


def test_what_python_cannot_read_is_not_shown() -> None:
    assert mask_source("password = 'x") == "…"
    assert mask_source("x = (" + "not " * 2000 + "1)\n") == "…\n"

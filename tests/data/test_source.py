from oasis_cli.data.source import TextSource


def test_digest_is_that_of_the_joined_text() -> None:
    """printf 'a\\n\\nb' | sha256sum"""
    source = TextSource("x", ("a", "b"))
    assert source.text == "a\n\nb"
    assert source.digest == "sha256:38022fd2b8dbc5cb3d2cee74e083edbf59e3d4e13d067ebcb5db633d4cff4d8c"


def test_separator_joins_the_rows() -> None:
    assert TextSource("x", ("a", "", "b"), separator=" ").text == "a  b"

"""Asks the server as the official `openai` client does, and reads its page in a browser.

    python -m tests.integrations.server                # needs Chromium, and playwright to drive it
    python -m tests.integrations.server --no-browser

Needs `openai` in an environment of its own: `make integrations`.
"""

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import openai

DEADLINE = 120.0
NAME = "stdlib_bytes"
PROMPT = """import re


class Table:
    '''Rows of cells, each of them a string.'''

    def __init__(self, rows):
"""
# What the page says, and the metric that it says it of.
FIGURES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "tokens": "vllm:generation_tokens_total",
    "prompt tokens": "vllm:prompt_tokens_total",
    "found in the cache": "vllm:prefix_cache_hits_total",
    "preempted": "vllm:num_preemptions_total",
}
BROWSERS = "chromium", "chromium-browser", "google-chrome", "chrome"


def metrics(url: str) -> dict[str, float]:
    """Reads the metrics, without their labels but the reason of an end."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line and line[0] != "#"]
    found = {}
    for line in lines:
        name, value = line.rsplit(" ", 1)
        reason = re.search(r'finished_reason="(\w+)"', name)
        found[name.partition("{")[0] + (f" {reason[1]}" if reason else "")] = float(value)
    return found


def wait_for(condition, what: str) -> None:
    """Waits until a condition holds."""
    end = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"in {DEADLINE:.0f} s there was no {what}")
        time.sleep(0.1)


def ask(url: str) -> None:
    """Chats, streams, cancels and gets log-probabilities and counts of cached tokens."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [NAME]
    greedy = dict(model=NAME, temperature=0)

    whole = client.completions.create(prompt=PROMPT, max_tokens=24, logprobs=2, **greedy)
    [choice] = whole.choices
    assert len(choice.logprobs.tokens) == whole.usage.completion_tokens == 24
    assert "".join(choice.logprobs.tokens) == choice.text
    best = [max(top.values()) for top in choice.logprobs.top_logprobs]
    assert all(abs(x - y) < 1e-3 for x, y in zip(best, choice.logprobs.token_logprobs, strict=True))
    again = client.completions.create(prompt=PROMPT, max_tokens=24, stop=[choice.text[5:8]], **greedy)
    assert again.choices[0].text == choice.text[: choice.text.index(choice.text[5:8])]
    assert again.usage.prompt_tokens_details.cached_tokens == (len(PROMPT) - 1) // 16 * 16
    salted = client.completions.create(
        prompt=PROMPT, max_tokens=1, extra_body={"cache_salt": "mine"}, **greedy
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    print(f"completions: {whole.usage.prompt_tokens} tokens, all but a block's rest found the second time")

    messages = [{"role": "user", "content": "def parse(text):"}]
    chat = client.chat.completions.create(
        messages=messages, max_completion_tokens=20, logprobs=True, top_logprobs=3, **greedy
    )
    content = chat.choices[0].logprobs.content
    assert "".join(token.token for token in content) == chat.choices[0].message.content
    assert all(len(token.top_logprobs) == 3 and token.bytes for token in content)
    stream = client.chat.completions.create(
        messages=messages,
        max_completion_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
        **greedy,
    )
    *chunks, last = stream
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == chat.choices[0].message.content
    assert last.usage.completion_tokens == 20 and chunks[-1].choices[0].finish_reason == "length"
    drawn = [
        client.chat.completions.create(model=NAME, messages=messages, max_tokens=12, n=3, seed=seed)
        for seed in (5, 5, 6)
    ]
    texts = [[choice.message.content for choice in answer.choices] for answer in drawn]
    assert texts[0] == texts[1] != texts[2] and len({*texts[0]}) > 1
    print(f"a chat whole and in {len(chunks)} pieces, with log-probabilities; samples by their seed")

    before = metrics(url).get("vllm:request_success_total cancelled", 0)
    stream = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=800, stream=True)
    next(iter(stream))
    stream.close()
    wait_for(
        lambda: metrics(url).get("vllm:request_success_total cancelled") == before + 1, "cancelled request"
    )
    wait_for(lambda: metrics(url)["vllm:num_requests_running"] == 0, "row that is free")
    print("a stream that its client closes is cancelled")

    for error, more in (
        (openai.NotFoundError, {"model": "other"}),
        (openai.BadRequestError, {"max_tokens": 5000}),
        (openai.BadRequestError, {"presence_penalty": 1.0}),
    ):
        try:
            client.completions.create(**{"model": NAME, "prompt": "a"} | more)
        except error as refused:
            print(f"{refused.status_code}: {refused.body['message']}")
        else:
            raise SystemExit(f"got an answer to {more}, expected {error.__name__}")


def look(url: str, browser: str) -> None:
    """Compares what the page says with the metrics, and asks by its form."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page()
        page.set_default_timeout(1000 * DEADLINE)
        page.goto(url)
        page.wait_for_selector("dd[data-name=running]")
        expected = metrics(url)
        names = [page.locator(f"dd[data-name='{name}']").inner_text() for name in FIGURES]
        found = dict(zip(FIGURES, (float(text.replace(",", "")) for text in names), strict=True))
        assert found == {name: expected[metric] for name, metric in FIGURES.items()}, expected
        assert expected["vllm:prefix_cache_hits_total"] > 0 and expected["vllm:generation_tokens_total"] > 100
        num_cached = page.locator("i.cached[title]").count()
        assert num_cached > 0 and page.locator("[role=alert]").inner_text() == ""
        print(f"the page in {browser}: {found}, {num_cached} cached blocks")

        page.fill("#prompt", PROMPT)
        page.fill("#tokens", "200")
        page.click("button")
        page.wait_for_selector("i.shared[title]")
        page.wait_for_selector("#answers p:has-text('generated')")
        said, texts = page.inner_text("#answers p"), page.locator("#answers output").all_inner_texts()
        assert re.match(rf"{len(PROMPT)} tokens of the prompt, \d\d+ of them found; 400 generated$", said), (
            said
        )
        assert len(texts) == 2 and all(texts) and texts[0] != texts[1], texts
        wait_for(lambda: page.locator("dd[data-name=running]").inner_text() == "0", "row that is free")
        page.fill("#tokens", "100000")
        page.click("button")
        page.wait_for_selector("#answers p:has-text('max_tokens is')")
        print(f"its form: {said}; {page.inner_text('#answers p')!r}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integrations.server")
    parser.add_argument("--no-browser", action="store_true", help="do not look at the page")
    options = parser.parse_args(arguments)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None and not options.no_browser:
        parser.error(f"there is no {BROWSERS[0]} on PATH: install it, or leave the page out by --no-browser")
    # A job in the background ignores SIGINT, and so would a child of it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "experiments.server", "--port", "0", "--rows", "4"]
    command += ["--chat-template", "plain"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and server.stderr is not None
        line = server.stdout.readline()
        if not line.startswith(f"serving {NAME} at "):
            raise SystemExit(f"the server said {line!r}: {server.stderr.read()}")
        url = line.split()[-1]
        ask(url)
        if not options.no_browser:
            look(url, browser)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        left_open = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=900, n=2, stream=True)
        next(iter(left_open))
    finally:
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=30)
    if server.returncode != 130 or "Traceback" in errors:
        raise SystemExit(f"the server ended with {server.returncode}: {errors}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

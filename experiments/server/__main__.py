"""An HTTP server with OpenAI's protocol on the engine, and a page on which one sees who holds which block.

Command: python -m experiments.server [--checkpoint DIR] [--port N] [--rows N] [--chat-template FILE]

/v1/completions, /v1/chat/completions and /v1/models take what OpenAI's clients send; /metrics is Prometheus
text under vLLM's names; / is the page. One thread owns the engine, and the event loop of HTTP waits for it
nowhere. See docs/guides/server.md.
"""

import argparse
import importlib.util
import os
import socket
from typing import Any

import kvcache_jax as kv
from experiments.common import command
from experiments.common.command import InputError
from experiments.common.corpus import MODEL
from kvcache_jax.layers.span import ceil_div

_PACKAGES = "fastapi", "jinja2", "prometheus_client", "uvicorn"


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"the server needs {', '.join(missing)}: pip install 'kvcache_jax[server]'")
    from experiments.server.app import Server
    from models.checkpoint import CheckpointError

    with parser.refusing(CheckpointError):
        with bound(options.host, options.port) as listening:
            service = make_service(options)
            server = Server(service)
            listening.listen(server.config.backlog)
            host, port = listening.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            print(f"serving {service.model} at http://{host}:{port}", flush=True)
            server.run([listening])
    return 0


def make_parser() -> command.Parser:
    parser = command.Parser("experiments.server", __doc__)
    add = parser.add_argument
    add("--checkpoint", type=command.name, default=MODEL, metavar="DIR", help="default: the small model")
    add("--name", metavar="NAME", help="of the model, for clients; default: the folder's")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else the checkpoint's")
    add("--host", default="127.0.0.1", help="address to listen on; default: %(default)s, this machine alone")
    parser.count("--port", 8000, "0: any", least=0, most=65535)
    add("--api-key", default=os.environ.get("KVCACHE_API_KEY"), metavar="KEY", help="or KVCACHE_API_KEY")
    parser.count("--rows", 8, "that run")
    parser.count("--max-len", None, "tokens of a row; default: the model's, at most 8192", least=2)
    parser.count("--blocks", None, "of the pool; default: enough for all rows")
    parser.count("--block-size", 16, "tokens")
    parser.count("--queue", 256, "that wait", least=0, most=2**16)
    parser.count("--max-tokens", None, "of an answer; default: a row's")
    add("--max-body", type=command.integer(1), default=2**20, metavar="BYTES", help="default: 1 MiB")
    parser.count("--top-logprobs", 5, "at most", least=0, most=20)
    add("--policy", default="fcfs", help="by which requests are served; default: %(default)s")
    add(
        "--chat-template",
        metavar="FILE",
        help='in place of the checkpoint\'s; "plain": ROLE: CONTENT, a line each',
    )
    return parser


def bound(host: str, port: int) -> socket.socket:
    """Takes an address, before anything is loaded.

    Raises:
      InputError: it is another's, or not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise InputError(
            f"cannot listen on {host} port {port}: {error.strerror}: take another --port"
        ) from None
    return found


def make_service(options: argparse.Namespace, *, thread: Any = None, **more: Any) -> Any:
    """Loads the model, and compiles the engine for it.

    Args:
      options: Of the command.
      thread: Serves requests in place of an engine's thread; then no model is loaded.
      **more: Of `Service`.

    Raises:
      InputError, CheckpointError: options that do not fit, no model, no tokenizer.
    """
    from experiments.server import chat_template
    from experiments.server.app import Service
    from experiments.server.engine_thread import EngineThread
    from models import checkpoint

    tokenizer = load_tokenizer(options)
    template = chat_template.read(options.checkpoint, options.chat_template)
    config = checkpoint.load_config(options.checkpoint, dtype=_dtype(options))
    max_len = min(options.max_len or 8192, config.max_seq_len)
    return Service(
        model=options.name or options.checkpoint.resolve().name,
        thread=thread or EngineThread(make_engine(options)),
        tokenizer=tokenizer,
        max_len=max_len,
        max_requests=options.rows + options.queue,
        max_tokens=min(options.max_tokens or max_len, max_len),
        max_logprobs=min(options.top_logprobs, config.vocab_size),
        max_body=options.max_body,
        template=template,
        api_key=options.api_key,
        **more,
    )


def load_tokenizer(options: argparse.Namespace) -> Any:
    """Loads the tokenizer of the options' checkpoint."""
    from experiments.server.tokens import QuietTokenizer
    from models import checkpoint

    return QuietTokenizer(checkpoint.load_tokenizer(options.checkpoint))


def make_engine(options: argparse.Namespace) -> kv.Engine:
    """Loads the model, and compiles the engine for it; raises as `make_service` does."""
    from models import checkpoint
    from models import decoder as models

    decoder = checkpoint.load(options.checkpoint, dtype=_dtype(options))
    max_len = min(options.max_len or 8192, decoder.config.max_seq_len)
    needed = ceil_div(max_len, options.block_size)
    if options.blocks is not None and options.blocks < needed:
        raise InputError(
            f"got --blocks {options.blocks}, expected at least {needed}, for a row of {max_len} tokens: "
            "raise it, or lower --max-len"
        )
    max_requests = options.rows + options.queue
    try:
        config = models.cache_config(
            decoder.config,
            block_size=options.block_size,
            max_seqs=options.rows,
            max_seq_len=max_len,
            num_blocks=options.blocks or options.rows * needed,
            enable_prefix_caching=True,
        )
        limits = kv.engine.Limits(
            max_requests=max_requests,
            max_tokens=max_requests * (max_len + 1),
            max_stop_tokens=max(1, len(load_tokenizer(options).stop_tokens)),
        )
        engine = kv.Engine(
            models.forward,
            models.for_decoding(decoder),
            config,
            policy=options.policy,
            limits=limits,
            num_top_logprobs=min(options.top_logprobs, decoder.config.vocab_size),
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    engine.compile()
    return engine


def _dtype(options: argparse.Namespace) -> str | None:
    import jax

    return options.dtype or ("float32" if jax.default_backend() == "cpu" else None)


if __name__ == "__main__":
    command.run(main)

"""The entry point that SGLang calls once in every process (group ``sglang.srt.plugins``, name ``atom``).

SGLang logs and forgets a plugin that raises and then serves its own model. So the first thing that goes in is a guard
that ends a launch which asks for us while ``complete`` is False; only then come the parts that can fail. Without
`--model-impl atom` or the attention backend ``atom`` nothing of ours has an effect.

In the main process only ``sglang.srt.server_args`` is touched, which every launch imports anyway; the rest waits until
a launch that asks for us is checked. A scheduler process has imported SGLang's loader before it calls us.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from atom_plugin import host, platform, settings
from atom_plugin.hooks import Hook, HookError, install

logger = logging.getLogger(__name__)

NAME = "atom"

#: Modules that are imported before ``register`` runs wherever a model can be built or resolved, or text is tokenized.
BUILDS_MODELS = {"sglang.srt.managers.scheduler", "sglang.srt.model_loader.utils"}
TOKENIZES = {"sglang.srt.managers.tokenizer_manager"}

#: Whether SGLang has called ``register`` in this process, and whether all that it does has taken.
loaded = False
complete = False

#: What a launch that asks for us is told while ``complete`` is False.
why_incomplete = (
    "atom-plugin failed to load in this process; the reason is logged above (`atom-plugin doctor` shows it again). "
    "Mend it, or launch without atom."
)


class LaunchRefused(SystemExit, ValueError):
    """A launch that we cannot serve.

    An exit for a command line, which then prints the message alone; a ValueError for a program that embeds SGLang.
    """

    def __str__(self) -> str:
        return str(self.code)


def _check_server_args(original: Callable[..., Any], server_args: Any) -> Any:
    impl = host.raw_flag(server_args, "model_impl")
    if impl != NAME and str(impl).strip().lower() == NAME:
        raise LaunchRefused(f"--model-impl {impl}: SGLang would take it for a name of its own; write {NAME}")
    asked = host.asks_for(server_args, NAME) if complete else host.asks_in_so_many_words(server_args, NAME)
    if asked:
        if not complete:
            raise LaunchRefused(f"{' and '.join(asked)}: {why_incomplete}")
        prepare_serving()
        from atom_plugin.refusals import refuse_launch

        refuse_launch(server_args)
        install([MEDIA])
    return original(server_args)


def _get_model_architecture(original: Callable[..., Any], model_config: Any) -> Any:
    if model_config.model_impl != NAME:
        return original(model_config)
    if not complete:
        raise LaunchRefused(f"--model-impl atom: {why_incomplete}")
    from atom_plugin.resolve import draft_model_architecture, our_model_architecture

    if model_config.is_draft_model:
        return draft_model_architecture(original, model_config)
    return our_model_architecture(model_config)


def _tokenize_one_request(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    if host.raw_flag(manager.server_args, "model_impl") == NAME and request.contains_mm_input():
        raise ValueError(
            "this request has images, videos or audio, and --model-impl atom serves language models alone, as that of "
            "Kimi-K2.5: send text, or launch without --model-impl atom"
        )
    return original(manager, request)


GATE = Hook(
    target="sglang.srt.server_args.ServerArgs.check_server_args",
    kind="around",
    hook=_check_server_args,
    why="the one place before any subprocess and any weight where every launch is checked, resolved flags and all",
    upstream="no official check for plugins as of 0.5.23",
    remove_when="SGLang lets a plugin refuse a launch",
)
MODEL = Hook(
    target="sglang.srt.model_loader.utils.get_model_architecture",
    kind="around",
    hook=_get_model_architecture,
    why="--model-impl takes any word, and an unknown one means SGLang's own model or the Transformers wrapper",
    upstream="SGLANG_EXTERNAL_MODEL_PACKAGE replaces a class for every --model-impl, so it is no substitute",
    remove_when="SGLang has a registry of model implementations by name",
)


MEDIA = Hook(
    target="sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request",
    kind="around",
    hook=_tokenize_one_request,
    why="a server whose model is not multimodal leaves images of /generate out in silence, and answers the text",
    upstream="0.5.23 refuses them with --language-model-only, which takes architectures by a list of its own",
    remove_when="SGLang refuses media for every model that it takes for a language model",
)


def register() -> None:
    """Make ``atom`` known to SGLang in this process.

    Raises HookError where SGLang has changed under us or is outside of the supported range, ValueError for a malformed
    ATOM_PLUGIN_ALLOW_SGLANG.
    """
    global loaded, complete
    loaded = True
    try:
        install([GATE])
    except HookError as error:
        if any(argument == NAME or argument.endswith(f"={NAME}") for argument in sys.argv):
            raise SystemExit(f"{error} Launch without atom, or with a supported SGLang.") from error
        install([MODEL])  # without the gate it refuses atom where the model is looked up, --config and Engine included
        raise
    _check_version()
    install([platform.DEVICE])
    if BUILDS_MODELS & sys.modules.keys():
        prepare_serving()
    if TOKENIZES & sys.modules.keys():
        install([MEDIA])
    host.add_attention_backend_choice(NAME)
    host.make_default_attention_backend(NAME, model_impl=NAME)
    complete = True


def _check_version() -> None:
    global why_incomplete
    reason = host.why_not_version()
    if not reason:
        return
    if settings.ALLOW_SGLANG.get() and host.says_version():
        logger.warning("%s: %s", reason, host.allowed_all_the_same())
        return
    why_incomplete = f"{reason}. {host.what_to_do_about_version()}, or launch without atom."
    raise HookError(why_incomplete)


def prepare_serving() -> None:
    """Put in what a process needs that builds or inspects the model: the class, the backend, the CPU's hooks."""
    from atom_plugin.cpu.install import install_cpu_hooks

    install([MODEL])
    host.register_attention_backend(NAME, _make_backend)
    if not platform.is_active():  # what gathers the chunks of a prefix, and merges them, are Triton kernels of SGLang's
        host.add_chunked_prefix_cache_backend(NAME)
    install_cpu_hooks()


def _make_backend(runner: Any) -> Any:
    from atom_plugin.attention.backend import AtomAttentionBackend

    return AtomAttentionBackend(runner)

"""``ucm doctor``: does the overlay act on the vLLM of this environment, and if not, why and what to do.

The static checks import neither vLLM nor torch and make nothing. Where other packages bring plug-ins of vLLM, a child
process loads these and says which of the overlay's functions they replace. ``--config FILE`` checks a file with
settings as well, as an engine would when it creates its connector. ``--run`` starts a short real engine in a child
process and counts the hooks that fire in each of its processes.

``ucm doctor --json`` prints one object. Its keys stay; new ones may be added. Unknown is null, paths are absolute.

- ``schema``: 1.
- ``status``: ``ok``, ``warning`` or ``error``: the worst of the findings. ``verdict``: one sentence, and
  another if settings that were checked are wrong.
- ``python``: ``version``, ``executable``, ``site_directories`` (those whose .pth files it reads).
- ``runtime``: ``version``, ``directory``, ``others`` (other distributions or copies of the package ``ucm``).
- ``vllm``: null, or ``directory``; ``distribution`` and ``version`` from metadata; ``stated`` (VLLM_VERSION);
  ``release`` by content, null unless all files fit one; ``nearest``, the release that fits best; ``files``, how many
  were compared; ``differing``; ``agree``, whether what is said and the content do (null where either is unknown).
- ``overlays``: each ``version``, ``release``, ``directory``; the one that Python imports first.
- ``import_hook``: ``position`` on ``sys.meta_path``; ``ahead`` and ``others``, import hooks that are not Python's own.
- ``start_up_files``: each .pth file that runs code, sitecustomize and usercustomize: ``path``, ``touches_vllm``,
  ``ours``.
- ``switches``: the UCM_DISABLE_* variables that are on.
- ``modules``: each ``name``, ``group``; ``upstream`` and ``rewritten``: ``ok``, ``changed`` or ``missing``;
  ``disabled``, the reason or null; ``loads``, the file that Python would load, null where importing would fail.
- ``findings``: each ``check``, ``status``, ``what``, ``details``, ``todo``.
- ``run``: null, or ``outcome`` (``finished``, ``failed``, ``timed out``); ``seconds``; ``output``, the kept log (null
  if all went well), and ``tail``, its end if the run did not finish; ``saw``, what the engine told; ``processes``,
  each ``pid``, ``process``, ``roles``, ``counts``; ``hooks``, each ``hook``, ``role``, ``expected``, ``reason`` (why
  not), ``fired`` by process id, ``status`` (``ok``, ``missing``, ``not expected``).
- ``next``: what to do, in order.
"""

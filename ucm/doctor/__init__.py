"""``ucm doctor``: check whether the overlay is active on this environment's vLLM; if not, say why and what to do.

The static checks import neither vLLM nor torch and create no files. ``--config FILE`` also checks a settings file, as
an engine does when it creates its connector. ``--run`` starts a short real engine in a child process and counts the
hooks that fire in each of its processes.

``ucm doctor --json`` prints one object. Its keys are stable; new ones may be added. Unknown values are null, paths are
absolute.

- ``schema``: 1.
- ``status``: ``ok``, ``warning`` or ``error``: the worst of the findings. ``verdict``: one sentence, and
  others if the prefix cache cannot run, or the checked settings or the model cannot be used.
- ``python``: ``version``, ``executable``, ``site_directories`` (the directories whose .pth files it reads).
- ``runtime``: ``version``, ``directory``, ``others`` (other distributions or copies of the package ``ucm``).
- ``vllm``: null, or ``directory``; ``distribution`` and ``version`` from metadata; ``stated`` (VLLM_VERSION);
  ``release`` by content, null unless all files match one; ``nearest``, the release that matches best; ``files``, how
  many were compared; ``differing``; ``agree``, whether the stated version and the content agree (null if either is
  unknown).
- ``overlays``: each ``version``, ``release``, ``directory``; the one that Python imports comes first.
- ``import_hook``: ``position`` on ``sys.meta_path``; ``ahead``, earlier import hooks that are not Python's own.
- ``start_up_files``: the .pth files that run code, sitecustomize and usercustomize, without those of overlays.
- ``switches``: the UCM_DISABLE_* variables that are set.
- ``modules``: each ``name``, ``group``; ``upstream`` and ``rewritten``: ``ok``, ``changed`` or ``missing``;
  ``disabled``, the reason or null; ``loads``, the file that Python would load, null if the import would fail.
- ``findings``: each ``check``, ``status``, ``what``, ``details``, ``todo``.
- ``run``: null, or ``outcome`` (``finished``, ``failed``, ``timed out``); ``seconds``; ``output``, the kept log (null
  after a run without problems), and ``tail``, its end if the run did not finish; ``saw``, what the engine reported;
  ``processes``, each ``pid``, ``process``, ``roles``, ``counts``; ``hooks``, each ``hook``, ``role``, ``expected``,
  ``reason`` (why it is not expected), ``fired`` by process id, ``status`` (``ok``, ``missing``, ``not expected``),
  ``at_least`` (how often it must fire in each process).
- ``next``: what to do, in order.
"""

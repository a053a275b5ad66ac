"""``ucm prove``: prove on the user's own model and device that answers with UCM are those without it.

Each engine runs in a process of its own. ``ucm prove --json`` prints one object. Its keys are stable; new ones may be
added. Unknown values are null.

- ``schema``: 1. ``code``: the exit code. ``seconds``: the duration.
- ``model``; ``device``; ``versions``; ``dtype``; ``runs``: by engine (``plain``, ``first``, ``restart`` and, with
  ``--sparse``, ``sparse, full budget``) each ``runner``, ``attention``, ``graphs``, and ``reason`` and ``tail`` if it
  failed or its time was over.
- ``prompts``: ``source`` (``text`` or ``token ids``), ``alone`` and ``crowd``, the tokens of each prompt.
- ``rows``: each ``name``; ``verdict``: ``same``, ``same but for noise``, ``DIFFERS`` or ``not judged``; ``requests``;
  ``differences``, each with ``request``, ``position``, ``expected``, ``got``, ``margin``, ``allowed``, ``shift``,
  ``limit``, ``is_noise``; ``reason``; ``shift``; ``cached_tokens``;
  ``loaded_bytes`` (null before vLLM 0.11.1; too small where vLLM drops the counts of steps without an output, as
  0.27.1 does); ``aborted``; ``preemptions``; ``seconds``.
- ``noise``: the plain engine's: ``alone``, ``batches``, ``differing``, ``requests``, ``resolution``.
- ``first_tokens``: median seconds by what was done.
- ``notes``: sentences.
"""

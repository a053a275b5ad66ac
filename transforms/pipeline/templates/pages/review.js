document.addEventListener("DOMContentLoaded", () => {
  const $ = (id) => document.getElementById(id);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const changes = all(".change");
  const modules = all(".module");
  const bar = document.querySelector(".bar");
  let current = -1;

  // --- unchanged lines, rendered when asked for ---

  function row(oldLine, newLine, html) {
    const element = document.createElement("div");
    element.className = "r";
    element.innerHTML = `<b data-n="${oldLine}"></b><code>${html}</code><b data-n="${newLine}"></b><code>${html}</code>`;
    return element;
  }

  function unfold(fold, part) {
    const template = fold.querySelector("template");
    const lines = template.innerHTML.split("\n");
    const take = part === "all" ? lines.length : Math.min(20, lines.length);
    const from = part === "tail" ? lines.length - take : 0;
    const [oldStart, newStart] = [Number(fold.dataset.old), Number(fold.dataset.new)];
    const shown = document.createElement("div");
    shown.className = "diff";
    shown.append(...lines.slice(from, from + take).map((html, i) => row(oldStart + from + i, newStart + from + i, html)));
    if (part === "tail") fold.after(shown); else fold.before(shown);
    lines.splice(from, take);
    if (!lines.length) { fold.remove(); return; }
    template.innerHTML = lines.join("\n");
    delete fold.text;
    if (from === 0) { fold.dataset.old = oldStart + take; fold.dataset.new = newStart + take; }
    fold.querySelector(".label").textContent = `${lines.length} unchanged lines`;
  }

  document.addEventListener("click", (event) => {
    const part = event.target.dataset?.take;
    if (part) { unfold(event.target.closest(".fold"), part); mark(); return; }
    if (event.target.matches(".whole")) {
      for (const fold of all(".fold", event.target.closest(".module"))) unfold(fold, "all");
      event.target.remove();
      mark();
    }
  });

  // --- from change to change ---

  const visible = () => changes.filter((change) => !change.hidden && !change.closest(".module").hidden);

  function step(by) {
    const shown = visible();
    if (!shown.length) return;
    const edge = bar.getBoundingClientRect().bottom + 12;
    const here = shown.indexOf(changes[current]);
    const box = here < 0 ? null : shown[here].getBoundingClientRect();
    let target;
    if (box && box.bottom > edge && box.top < innerHeight) {
      target = here + by;
    } else if (by > 0) {
      target = shown.findIndex((change) => change.getBoundingClientRect().top > edge);
    } else {
      target = shown.findLastIndex((change) => change.getBoundingClientRect().top < edge - 24);
    }
    if (target < 0) target = by > 0 ? shown.length - 1 : 0;
    target = Math.min(target, shown.length - 1);
    current = changes.indexOf(shown[target]);
    shown[target].scrollIntoView({ block: "start" });
    shown[target].focus({ preventScroll: true });
    place(shown);
  }

  function place(shown = visible()) {
    const here = shown.indexOf(changes[current]);
    $("position").textContent = here < 0 ? `${shown.length} changes` : `${here + 1} / ${shown.length}`;
  }

  // --- search: hides what does not match, counts what is folded ---

  const textOf = (element) => (element.text ??= element.textContent.toLowerCase());
  const codeOf = (change) => (change.code ??= `${change.dataset.rules} ${change.querySelector("h3").textContent} ${
    all(".r > :last-child, .r > del", change).map((line) => line.textContent).join("\n")}`.toLowerCase());

  function search() {
    const words = $("search").value.trim().toLowerCase();
    let [places, found] = [0, 0];
    for (const module of modules) {
      const named = words && module.querySelector("h2").textContent.toLowerCase().includes(words);
      let hits = 0;
      for (const change of all(".change", module)) {
        change.hidden = Boolean(words) && !named && !codeOf(change).includes(words);
        if (words && !change.hidden) hits += 1;
      }
      for (const fold of all(".fold", module)) {
        fold.text ??= fold.querySelector("template").content.textContent.toLowerCase();
        const lines = words ? fold.text.split(words).length - 1 : 0;
        fold.querySelector(".hits")?.remove();
        fold.hidden = Boolean(words) && !lines && !named;
        if (lines) {
          const told = document.createElement("span");
          told.className = "hits";
          told.textContent = `${lines} found here`;
          fold.querySelector(".label").after(told);
          hits += lines;
        }
      }
      for (const diff of all(":scope > .diff", module)) diff.hidden = Boolean(words) && !named && !textOf(diff).includes(words);
      module.hidden = Boolean(words) && !hits && !named;
      document.querySelector(`[data-for="${module.id}"]`).hidden = module.hidden;
      places += hits;
      if (!module.hidden) found += 1;
    }
    for (const id of ["overview", "since", "not-inserted"]) if ($(id)) $(id).hidden = Boolean(words);
    $("none").hidden = !words || found > 0;
    $("found").textContent = words ? `${places} in ${found} module${found === 1 ? "" : "s"}` : "";
    place();
    mark();
  }

  function mark() {
    if (!window.Highlight) return;
    const words = $("search").value.trim().toLowerCase();
    const ranges = [];
    if (words.length > 1) {
      for (const line of all("main .r > :last-child, main .r > del, .rule")) {
        if (ranges.length > 2000) break;
        const at = line.textContent.toLowerCase().indexOf(words);
        if (at >= 0 && !line.closest("[hidden]")) ranges.push(range(line, at, at + words.length));
      }
    }
    CSS.highlights.set("found", new Highlight(...ranges));
  }

  function range(line, start, end) {
    const found = document.createRange();
    const walker = document.createTreeWalker(line, NodeFilter.SHOW_TEXT);
    let position = 0;
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const next = position + node.length;
      if (start >= position && start < next) found.setStart(node, start - position);
      if (end > position && end <= next) { found.setEnd(node, end - position); break; }
      position = next;
    }
    return found;
  }

  // --- records, keys, contents ---

  function records() {
    const open = $("records").getAttribute("aria-pressed") !== "true";
    $("records").setAttribute("aria-pressed", String(open));
    for (const record of all(".record")) record.open = open;
  }

  let waiting;
  $("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(search, 120); });
  $("next").addEventListener("click", () => step(1));
  $("previous").addEventListener("click", () => step(-1));
  $("records").addEventListener("click", records);
  const keys = { n: () => step(1), p: () => step(-1), r: records, t: nextTheme, "/": () => $("search").focus() };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target === $("search")) {
      if (event.key === "Escape") { $("search").value = ""; search(); $("search").blur(); }
      if (event.key === "Enter") { $("search").blur(); step(1); }
      return;
    }
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });

  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const link = document.querySelector(`[data-for="${target.id}"] a`);
      if (isIntersecting) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-25% 0px -70% 0px" });
  for (const module of modules) watcher.observe(module);

  if (matchMedia("(max-width: 1000px)").matches) $("contents").open = false;
  for (const module of modules) { const first = module.querySelector(".record"); if (first) first.open = true; }
  if (matchMedia("(min-width: 1750px)").matches) records();
  place();
});

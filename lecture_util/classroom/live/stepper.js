// Draws what the kernel says (sources, picture, boxes) and sends back what is pressed.

const MOVES = [
  ["start", "Start", "Home", "⇤"],
  ["back", "Back", "ArrowLeft", "←"],
  ["forward", "Forward", "ArrowRight", "→"],
  ["over", "Over", " ", "␣"],
  ["into", "Into", "ArrowDown", "↓"],
  ["out", "Out", "ArrowUp", "↑"],
  ["end", "End", "End", "⇥"],
];
const BACKWARD = new Set(["start", "back"]);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function filled(tag, attributes, html) {
  const node = make(tag, attributes);
  node.innerHTML = html;
  return node;
}

function render({ model, el }) {
  const root = make("div", {
    class: "stepper",
    tabindex: "0",
    role: "group",
    "aria-label": "Stepper: arrow keys walk, Space steps over, Home and End go to the ends",
    "data-lm-suppress-shortcuts": "true", // its keys are its own, not the notebook's
  });
  const title = make("span", { class: "step-title" });
  const where = make("span", { class: "step-where" });
  const bar = make("div", { class: "step-bar", role: "toolbar", "aria-label": "Walk" });
  const code = make("div", { class: "step-code", role: "list", "aria-label": "Source" });
  const values = make("div", { class: "step-values", role: "region", "aria-label": "Values" });
  const form = make("form", { class: "step-form", "aria-label": "Arguments" });
  const note = make("div", { class: "step-note" });
  const printed = make("pre", { class: "step-printed", "aria-label": "Printed" });
  const said = make("div", { class: "step-said", role: "status", "aria-live": "polite" });
  const send = (message) => model.send(message);

  const buttons = {};
  for (const [move, label, key, sign] of MOVES) {
    const button = make(
      "button",
      { type: "button", "data-move": move, "aria-label": label, title: `${label} (key ${key === " " ? "Space" : key})` },
      make("span", { "aria-hidden": "true" }, sign),
      ` ${label}`,
    );
    button.setAttribute("aria-keyshortcuts", key === " " ? "Space" : key);
    button.onclick = () => send({ do: move });
    buttons[move] = button;
    bar.append(button);
  }
  const line = make("input", { type: "number", class: "step-to", "aria-label": "Go to line, then Enter", placeholder: "line" });
  bar.append(line);

  function drawBoxes() {
    const typed = document.activeElement?.closest?.(".step-form") === form ? document.activeElement.name : null;
    form.replaceChildren();
    for (const box of model.get("boxes")) {
      const label = make("label", {}, `${box.name} = `);
      if (box.editable) {
        const size = String(Math.max(4, Math.min(24, box.text.length + 1)));
        const input = make("input", { name: box.name, size, spellcheck: "false", autocomplete: "off" });
        input.value = box.text;
        input.setAttribute("aria-invalid", String(Boolean(box.error)));
        label.append(input);
      } else {
        const shared = box.shared ? " (shared by all runs)" : "";
        label.append(make("code", { title: box.text + shared }, box.text), shared);
      }
      if (box.error) label.append(make("span", { class: "step-error", role: "alert" }, `✗ ${box.error}`));
      form.append(label);
    }
    form.append(make("button", { type: "submit" }, "Run again"));
    if (typed) form.elements[typed]?.focus();
  }
  form.onsubmit = (event) => {
    event.preventDefault();
    const texts = {};
    for (const input of form.querySelectorAll("input")) texts[input.name] = input.value;
    note.textContent = "running …";
    send({ do: "run", texts });
  };

  let drawn = null;
  function drawSource(key) {
    if (drawn === key) return;
    drawn = key;
    const source = model.get("sources")[key];
    title.textContent = source.title;
    const least = Math.min(...source.lines.map(([, html]) => (html.trim() ? html.search(/\S|$/) : 99)));
    code.replaceChildren(
      ...source.lines.map(([number, html]) => {
        const row = make("div", { class: "step-line", role: "listitem", "data-line": number, title: `Run to line ${number}` });
        const indent = html.trim() ? Math.max(0, html.search(/\S|$/) - least) : 0;
        const text = filled("code", { style: `--indent: ${indent}ch` }, html.trimStart() || " ");
        row.append(make("span", { class: "step-arrow", "aria-hidden": "true" }), make("span", { class: "step-number" }, String(number)), text);
        row.onclick = () => {
          if (!String(document.getSelection())) send({ do: "line", line: number });
        };
        return row;
      }),
    );
  }

  function drawValue(value) {
    const name = make("button", { type: "button", class: "step-name", "aria-expanded": String(Boolean(value.history)), title: "Show earlier values" }, value.name);
    name.onclick = () => send({ do: "history", name: value.name });
    const head = make("div", { class: "step-head" }, name, make("span", { class: "step-from" }, value.argument ? "argument" : `line ${value.line}`));
    if (value.changed) head.append(make("span", { class: "step-changed" }, "● changed"));
    const row = make("div", { class: "step-value" + (value.changed ? " step-is-changed" : ""), "data-name": value.name }, head, filled("div", { class: "step-what" }, value.html));
    if (value.history) {
      const past = value.history.map(([at, html]) => filled("li", {}, `<span class="step-from">line ${at}</span> ${html}`));
      row.append(make("ol", { class: "step-history", "aria-label": `Earlier values of ${value.name}` }, ...past));
    }
    return row;
  }

  function draw() {
    const picture = model.get("picture");
    drawSource(picture.source);
    where.textContent = (picture.trail.length > 1 ? `${picture.trail.join(" › ")}: ` : "") + picture.where;
    const [first, last] = picture.span;
    for (const row of code.children) {
      const number = Number(row.dataset.line);
      const here = number >= first && number <= last;
      row.classList.toggle("step-here", here);
      row.classList.toggle("step-raised", here && picture.kind === "raise");
      row.firstChild.textContent = here && number === first ? "▶" : "";
      if (number === first) row.setAttribute("aria-current", "step");
      else row.removeAttribute("aria-current");
    }
    const here = code.querySelector(".step-here");
    if (here) code.scrollTop = here.offsetTop - code.offsetTop - code.clientHeight / 2.5;
    const open = document.activeElement?.closest?.(".step-value")?.dataset.name;
    const rows = picture.values.map(drawValue);
    if (picture.outcome.html) {
      const raised = picture.kind === "raise" ? " step-stop" : "";
      rows.unshift(filled("div", { class: `step-outcome${raised}` }, `${picture.outcome.says} ${picture.outcome.html}`));
    }
    values.replaceChildren(...rows);
    const news = values.querySelector(".step-is-changed");
    const below = news ? news.offsetTop + news.offsetHeight - values.clientHeight : 0;
    values.scrollTop = picture.outcome.html ? 0 : below;
    if (open) values.querySelector(`[data-name="${CSS.escape(open)}"] .step-name`)?.focus();
    note.textContent = picture.note;
    printed.textContent = picture.printed;
    said.textContent = picture.said;
    for (const [move] of MOVES) {
      const stuck = BACKWARD.has(move) ? picture.first : picture.last;
      buttons[move].setAttribute("aria-disabled", String(stuck));
    }
  }

  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      event.stopPropagation(); // leaves the stepper; the next one is the slide deck's
      return document.activeElement.blur();
    }
    if (event.target.tagName === "INPUT") {
      event.stopPropagation();
      if (event.key === "Enter") {
        event.preventDefault(); // the notebook would take it
        if (event.target === line) send({ do: "line", line: Number(line.value) });
        else form.requestSubmit();
      }
      return;
    }
    if (event.target.tagName === "BUTTON" && event.key === " ") return; // presses the button
    const move = MOVES.find(([, , key]) => key === event.key);
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    send({ do: move[0] });
  });

  root.append(make("div", { class: "step-top" }, title, where), form, bar, make("div", { class: "step-panes" }, code, values), note, printed, said);
  el.append(root);
  model.on("change:picture", draw);
  model.on("change:boxes", drawBoxes);
  model.on("change:sources", () => (drawn = null));
  drawBoxes();
  draw();
}

export default { render };

// What `make present` adds to JupyterLab: one plugin, loaded as it stands, without a build step.
//
// It starts the deck on the notebook that was asked for and puts four buttons below it:
//   Run all      runs every cell, from the first
//   Notes        a window for the presenter: the slide's notes, the next title, a clock
//   Start again  the notebook as it was, a fresh kernel, the first slide
//   Reveal       puts the solution into its answer cell, runs it and its check
'use strict';
(() => {
  const HERE = document.currentScript.src.replace(/[^/]*$/, '');
  const pause = ms => new Promise(done => setTimeout(done, ms));

  function activate(app) {
    const sheet = Object.assign(document.createElement('link'), { rel: 'stylesheet', href: HERE + 'stage.css' });
    document.head.append(sheet);
    const run = (command, args) => app.commands.execute(command, args);
    const notebook = () => app.shell.currentWidget?.content;
    const meta = cell => cell.model.sharedModel.getMetadata();
    const onScreen = () => notebook().widgets.filter(cell => cell.hasClass('jp-deck-mod-onscreen'));
    const hidden = cells => cells.filter(cell => meta(cell).stage?.solution && !cell.revealed);

    async function runAt(index) {
      notebook().activeCellIndex = index;
      await run('notebook:run-cell');
    }

    // Keep to the slide: going to a cell of another one would turn the page.
    async function reveal() {
      const [answer] = hidden(onScreen());
      if (!answer) return;
      const { solution, id } = meta(answer).stage;
      answer.model.sharedModel.setSource(solution);
      answer.revealed = true;
      const shown = onScreen(), all = notebook().widgets;
      await runAt(all.indexOf(answer));
      const check = shown.find(cell => meta(cell).nbgrader?.grade_id === `check-${id}`);
      if (check) await runAt(all.indexOf(check));
      update();
    }

    function revealAll() {
      for (const cell of hidden(notebook().widgets)) {
        cell.model.sharedModel.setSource(meta(cell).stage.solution);
        cell.revealed = true;
      }
      update();
    }

    async function startAgain() {
      const panel = app.shell.currentWidget;
      const path = panel.context.path.replace(/^.*\//, 'start/');
      const file = await app.serviceManager.contents.get(path);
      await panel.sessionContext.session?.kernel?.restart();
      panel.content.model.fromJSON(file.content);
      await pause(100); // the new cells are drawn first
      panel.content.activeCellIndex = 1;
      panel.content.activeCellIndex = 0;
      await pause(50);
      update();
    }

    let page = null; // the presenter's window
    const stage = document.createElement('div');
    stage.className = 'stage';
    stage.setAttribute('role', 'toolbar');
    stage.setAttribute('aria-label', 'Stage');
    const button = (name, text, act) => {
      const made = document.createElement('button');
      made.className = `stage-${name}`;
      made.textContent = text;
      made.onclick = async () => {
        await act();
        notebook().activeCell?.node.focus(); // so that keys turn slides again
      };
      stage.append(made);
      return made;
    };
    button('run', 'Run all', () => void run('notebook:run-all-cells'));
    button('notes', 'Notes', () => {
      page = window.open('', 'notes', 'width=700,height=500');
      update();
    });
    button('again', 'Start again', startAgain);
    const revealer = button('reveal', 'Reveal', reveal); // last: it comes and goes
    document.body.append(stage);

    function update() {
      if (!notebook()?.widgets) return;
      const cells = onScreen(), [answer] = hidden(cells);
      revealer.hidden = !answer;
      if (answer) revealer.textContent = `Reveal the solution of ${meta(answer).stage.id}`;
      // The deck would take the arrow keys from a slider that has the focus.
      for (const node of notebook().node.querySelectorAll('.jupyter-widgets'))
        node.setAttribute('data-lm-suppress-shortcuts', 'true');
      if (page && !page.closed) showNotes(page, cells[0] ? meta(cells[0]).stage : null);
    }

    function showNotes(target, about) {
      const text = target.document.body;
      target.document.title = 'Speaker notes';
      text.style.cssText = 'font: 20px/1.5 sans-serif; margin: 1.5em; white-space: pre-wrap';
      const clock = new Date().toLocaleTimeString();
      const next = about?.next ? `\n\nNext: ${about.next}` : '';
      text.textContent = `${clock}   ${about?.title ?? ''}\n\n${about?.notes ?? 'No notes.'}${next}`;
    }

    async function open() {
      await app.restored;
      while (!app.shell.currentWidget?.sessionContext) await pause(100);
      const panel = app.shell.currentWidget;
      await panel.context.ready;
      await panel.revealed;
      await run('deck:start');
      setInterval(update, 300); // follows slides, outputs and widgets alike
    }
    // A clicker's keys, wherever the focus is: one step on, one step back, subslides included.
    for (const [key, direction, alternate] of [['PageDown', 'down', 'forward'], ['PageUp', 'up', 'back']])
      app.commands.addKeyBinding({
        command: 'deck:go', args: { direction, alternate }, keys: [key],
        selector: "body[data-jp-deck-mode='presenting']",
      });
    window.stage = { reveal, revealAll, startAgain };
    void open();
  }

  const plugin = { id: 'stage:plugin', autoStart: true, activate };
  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB.stage = {
    init() {},
    get: async () => () => ({ __esModule: true, default: plugin }),
  };
})();

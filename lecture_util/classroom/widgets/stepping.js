// Arrow keys on the buttons and the picture of a stepped widget; keeps the present step in view.

function render({ model, el }) {
  let box, observer, stopped = false;

  function prepare() {
    for (const part of box.querySelectorAll(".stepped")) {
      part.dataset.lmSuppressShortcuts = "true"; // its arrow keys are its own, not the notebook's
      if (part.tagName === "BUTTON" || part.tabIndex === 0) continue;
      part.tabIndex = 0;
      part.setAttribute("role", "group");
      part.setAttribute("aria-label", model.get("label"));
    }
    const now = box.querySelector(".stepped [data-now]");
    const room = now?.closest("[data-scrolls]");
    if (!room) return;
    const [inner, outer] = [now.getBoundingClientRect(), room.getBoundingClientRect()];
    if (inner.bottom > outer.bottom) room.scrollTop += inner.bottom - outer.bottom + 40;
    if (inner.top < outer.top) room.scrollTop -= outer.top - inner.top + 4;
  }

  function press(event) {
    const part = event.target.closest(".stepped");
    if (!part || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    if (event.key === "Escape") {
      event.stopPropagation(); // leaves the widget; the next one is the slide deck's
      return event.target.blur();
    }
    const forward = part.tagName === "BUTTON" ? "" : " "; // the space bar clicks a button anyway
    const by = { ArrowLeft: -1, ArrowRight: 1, [forward]: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    model.set("moves", model.get("moves") + by);
    model.save_changes();
  }

  function start() {
    if (stopped) return;
    const inner = el.isConnected ? el.closest(".widget-vbox") : null;
    if (!inner) return setTimeout(start, 100); // not yet in the page
    box = inner.parentElement.closest(".widget-vbox") ?? inner; // the whole widget
    prepare();
    observer = new MutationObserver(prepare);
    observer.observe(box, { subtree: true, childList: true, attributeFilter: ["class"] });
    box.addEventListener("keydown", press);
  }
  start();
  return () => {
    stopped = true;
    observer?.disconnect();
    box?.removeEventListener("keydown", press);
  };
}

export default { render };

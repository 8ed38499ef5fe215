"""A name and a value for each slider, and names for Play's buttons, as a screen reader wants them.

ipywidgets writes a slider's description beside it but ties the two in no way, and gives the number
of the choice ("4") for its value ("16"). This sets both in the browser, and again at each move.
The buttons of a Play widget, which are pictures only, get names too.
"""

from __future__ import annotations

import anywidget
import ipywidgets as widgets


class Names(anywidget.AnyWidget):
    """Invisible: names the sliders in the box that it is put in."""

    _esm = """
    function name(box) {
      for (const slider of box.querySelectorAll(".widget-slider")) {
        const handle = slider.querySelector("[role=slider]");
        const says = {
          "aria-label": slider.querySelector(".widget-label")?.textContent,
          "aria-valuetext": slider.querySelector(".widget-readout")?.textContent,
        };
        for (const [key, value] of Object.entries(says))
          if (handle && value && handle.getAttribute(key) !== value)
            handle.setAttribute(key, value);
      }
      for (const [place, says] of ["play or pause", "back to the start"].entries())
        for (const button of box.querySelectorAll(
            `.widget-play > button:nth-of-type(${place + 1}):not([aria-label])`)) {
          button.setAttribute("aria-label", button.title = says);
          button.dataset.lmSuppressShortcuts = "true";  // else JupyterLab takes the space bar
        }
    }
    export default {
      render({ el }) {
        let observer, stopped = false;
        const start = () => {
          const box = el.closest(".widget-vbox");
          if (stopped) return;
          if (!box) { setTimeout(start, 100); return; }  // not yet in the page
          name(box);
          observer = new MutationObserver(() => name(box));
          observer.observe(box, { subtree: true, childList: true, characterData: true,
                                  attributeFilter: ["aria-valuetext"] });
        };
        start();
        return () => { stopped = true; observer?.disconnect(); };
      }
    };
    """

    def __init__(self) -> None:
        super().__init__(layout=widgets.Layout(display="none"))

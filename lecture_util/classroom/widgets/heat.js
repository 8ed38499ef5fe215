// A map of cells: Python says the colours and the words, this draws them and says which is picked.

const LEFT = 84, RIGHT = 8, TOP = 34, BOTTOM = 40, MOST = 345, WIDEST = 84; // pixels
const FONT = "15px 'DejaVu Sans', system-ui, sans-serif";

function render({ model, el }) {
  const box = document.createElement("div");
  const canvas = document.createElement("canvas");
  box.className = "heat-map";
  box.tabIndex = 0;
  box.setAttribute("role", "application");
  box.setAttribute("aria-roledescription", "map of cells");
  box.dataset.lmSuppressShortcuts = "true"; // its arrow keys are its own, not the notebook's
  box.style.cssText = "width: 100%; line-height: 0; outline-offset: -3px; border-radius: 4px";
  canvas.style.cssText = "width: 100%; cursor: pointer; touch-action: manipulation";
  canvas.setAttribute("aria-hidden", "true");
  box.append(canvas);
  el.append(box);
  el.style.width = "100%";

  let place = null; // where the cells lie: left, top, width and height of one, in pixels

  function draw() {
    const map = model.get("map"), across = box.clientWidth;
    if (!map.rows || !across) return;
    const width = Math.min(WIDEST, (across - LEFT - RIGHT) / map.columns);
    const height = Math.min(34, MOST / map.rows);
    place = { left: LEFT, top: TOP, width, height };
    const down = TOP + height * map.rows + BOTTOM, ratio = window.devicePixelRatio || 1;
    canvas.width = across * ratio;
    canvas.height = down * ratio;
    canvas.style.height = `${down}px`;
    box.setAttribute("aria-label", map.label);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, across, down);
    cells(pen, map);
    ticks(pen, map);
    legend(pen, map, across);
    frame(pen, model.get("outline"), "#1A1A1A", 2, [4, 3]);
    const [row, column] = model.get("cell");
    frame(pen, row === undefined ? [] : [row, column, column + 1], "#D55E00", 4, []);
  }

  function cells(pen, map) {
    const gap = Math.min(place.width, place.height) > 8 ? 1 : 0;
    map.colors.forEach((color, i) => {
      if (!color) return; // a folded row's end
      const x = place.left + (i % map.columns) * place.width;
      const y = place.top + Math.floor(i / map.columns) * place.height;
      pen.fillStyle = color;
      pen.fillRect(x, y, place.width - gap + (gap ? 0 : 0.5), place.height - gap + (gap ? 0 : 0.5));
    });
  }

  function ticks(pen, map) {
    const end = place.top + place.height * map.rows;
    pen.fillStyle = "#1A1A1A";
    pen.font = FONT;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const [row, text] of map.row_ticks)
      pen.fillText(text, place.left - 6, place.top + (row + 0.5) * place.height);
    pen.textAlign = "center";
    for (const [column, text] of map.column_ticks)
      pen.fillText(text, place.left + (column + 0.5) * place.width, end + 10);
    pen.textAlign = "left";
    pen.fillText(map.column_title, place.left, end + 29);
    pen.font = "bold " + FONT;
    pen.fillText(map.row_title, 4, place.top - 16);
  }

  function legend(pen, map, across) {
    const size = 150, x = across - RIGHT - size - 52;
    map.scale.forEach((color, i) => {
      pen.fillStyle = color;
      pen.fillRect(x + (i * size) / map.scale.length, 10, size / map.scale.length + 0.5, 14);
    });
    pen.fillStyle = "#1A1A1A";
    pen.font = FONT;
    pen.textAlign = "right";
    pen.fillText(`${map.colored_by}: ${map.ends[0]}`, x - 6, 17);
    pen.textAlign = "left";
    pen.fillText(map.ends[1], x + size + 6, 17);
  }

  function frame(pen, [row, start, stop], color, lineWidth, dash) {
    if (row === undefined) return;
    const y = place.top + row * place.height, x = place.left + start * place.width;
    const width = (stop - start) * place.width;
    for (const [style, wide] of [["#fff", lineWidth + 3], [color, lineWidth]]) {
      pen.strokeStyle = style;
      pen.lineWidth = wide;
      pen.setLineDash(style === color ? dash : []);
      pen.strokeRect(x - 1, y - 1, width + 1, place.height + 1);
    }
    pen.setLineDash([]);
  }

  function pick(row, column) {
    const map = model.get("map");
    row = Math.max(0, Math.min(map.rows - 1, row));
    column = Math.max(0, Math.min(map.columns - 1, column));
    while (column && !map.colors[row * map.columns + column]) column--;
    model.set("cell", [row, column]);
    model.save_changes();
  }

  canvas.addEventListener("click", (event) => {
    if (!place) return;
    const at = canvas.getBoundingClientRect(), map = model.get("map");
    const row = Math.floor((event.clientY - at.top - place.top) / place.height);
    const column = Math.floor((event.clientX - at.left - place.left) / place.width);
    const inside = row >= 0 && row < map.rows && column >= 0 && column < map.columns;
    box.focus();
    if (inside) pick(row, column);
  });

  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      event.stopPropagation(); // leaves the map; the next one is the slide deck's
      return box.blur();
    }
    const [row, column] = model.get("cell"), { columns } = model.get("map");
    const to = {
      ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1], Home: [row, 0], End: [row, columns - 1],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    event.stopPropagation();
    if (row === undefined) pick(0, 0);
    else pick(...to);
  });
  box.addEventListener("focus", () => (box.style.outline = "3px solid #0072B2"));
  box.addEventListener("blur", () => (box.style.outline = "none"));

  for (const name of ["map", "cell", "outline"]) model.on(`change:${name}`, draw);
  const observer = new ResizeObserver(draw);
  observer.observe(box);
  draw();
  return () => {
    observer.disconnect();
    for (const name of ["map", "cell", "outline"]) model.off(`change:${name}`, draw);
  };
}

export default { render };

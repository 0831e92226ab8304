"use strict";
// Sort tables of runs by a click on the title of a column; values that are no numbers come last.
const numberIn = text => {
  const found = text.replaceAll(",", "").match(/^-?[\d.]+(e[-+]?\d+)?((:\d\d)+)?/);
  return found ? found[0].split(":").reduce((sum, part) => 60 * sum + Number(part), 0) : NaN;
};
for (const table of document.querySelectorAll("table.sorts")) {
  const titles = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  titles.forEach((title, column) => {
    const button = document.createElement("button");
    button.append(...title.childNodes);
    title.append(button);
    button.onclick = () => {
      const textOf = row => row.cells[column].textContent.trim();
      const rows = [...body.rows], numbers = new Map(rows.map(row => [row, numberIn(textOf(row))]));
      const numeric = column > 0 && rows.some(row => !isNaN(numbers.get(row)));
      const before = title.ariaSort, down = before ? before === "ascending" : numeric;
      const compared = numeric
        ? (a, b) => isNaN(numbers.get(a)) - isNaN(numbers.get(b)) || (numbers.get(a) - numbers.get(b)) * (down ? -1 : 1)
        : (a, b) => textOf(a).localeCompare(textOf(b), "en", {numeric: true}) * (down ? -1 : 1);
      titles.forEach(other => other.removeAttribute("aria-sort"));
      title.ariaSort = down ? "descending" : "ascending";
      body.append(...rows.sort(compared));
    };
  });
}
// Show the values of a chart next to the pointer: of the x value with a point that is nearest to it.
for (const plot of document.querySelectorAll(".plot")) {
  const {axis, box: [left, bottom, right, top], limits, percent, lines} = JSON.parse(plot.dataset.values);
  const [guide, tip] = ["guide", "tip"].map(name => plot.appendChild(document.createElement("div")));
  [guide.className, tip.className] = ["guide", "tip"];
  guide.style.cssText = `top: ${100 * (1 - top)}%; height: ${100 * (top - bottom)}%`;
  tip.style.top = `${100 * (1 - bottom)}%`;
  const share = x => (x - limits[0]) / (limits[1] - limits[0]);
  const written = y => percent ? `${(100 * y).toFixed(2)}%` : String(Number(y.toPrecision(5)));
  const points = lines.map(({x, y}) => x.map((at, i) => [at, y[i]]).filter(([at, value]) => at !== null && value !== null));
  plot.onpointermove = plot.onpointerdown = event => {
    const area = plot.getBoundingClientRect();
    const at = ((event.clientX - area.left) / area.width - left) / (right - left);
    const far = ([x]) => Math.abs(share(x) - at);
    const nearest = points.map(of => of.reduce((best, point) => best && far(best) <= far(point) ? best : point, null));
    const chosen = nearest.filter(point => point).sort((a, b) => far(a) - far(b))[0];
    const close = point => point && Math.abs(share(point[0]) - share(chosen[0])) < 0.02;
    const found = nearest.map((point, i) => [point, lines[i]]).filter(([point]) => chosen && close(point));
    plot.classList.toggle("shown", found.length > 0 && at > -0.05 && at < 1.05);
    if (!found.length) return;
    tip.replaceChildren(`${axis} ${Number(chosen[0].toPrecision(4)).toLocaleString("en")}`);
    for (const [[, y], {name, colour}] of found.sort(([a], [b]) => b[1] - a[1])) {
      const row = tip.appendChild(document.createElement("div")), mark = document.createElement("span");
      mark.className = "mark";
      mark.style.background = colour;
      row.append(mark, Object.assign(document.createElement("b"), {textContent: written(y)}), ` ${name}`);
    }
    guide.style.left = `${100 * (left + share(chosen[0]) * (right - left))}%`;
  };
  plot.onpointerleave = () => plot.classList.remove("shown");
}

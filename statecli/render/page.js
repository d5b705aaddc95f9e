"use strict";
// Sorts the rows of each group by the column whose head is pressed: up, down, and as they came. Nothing else needs it.
for (const table of document.querySelectorAll("table[data-sorts]")) {
  const heads = [...table.tHead.rows[0].cells];
  const bodies = [...table.tBodies].map((body) => ({ body, rows: [...body.rows].slice(1) }));
  const words = new Intl.Collator("en", { numeric: true });
  const units = { "": 1, k: 1e3, M: 1e6, G: 1e9, T: 1e12 };

  // The first number of a cell with its unit ("all 1,536", "90.9 MB"), the last of a range ("0.06..0.07"); null where
  // there is none.
  const numeric = (text) => {
    const found = /(?<![\w.])([-+]?)(?:(inf|∞)|(\d[\d,]*\.?\d*(?:e[-+]?\d+)?)\s?([kMGT]?)(?![a-z]))/.exec(text.split("..").pop());
    if (!found) return null;
    const size = found[2] ? Infinity : Number(found[3].replaceAll(",", "")) * units[found[4]];
    return found[1] === "-" ? -size : size;
  };

  const sorted = (rows, column, right, sign) => {
    const keyed = rows.map((row) => {
      const text = row.cells[column].textContent;
      return { row, key: right ? numeric(text) : text };
    });
    // Rows without a number stay last, whichever way.
    keyed.sort((a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
      return sign * (right ? (a.key > b.key) - (a.key < b.key) : words.compare(a.key, b.key));
    });
    return keyed.map((one) => one.row);
  };

  const press = (column) => {
    const head = heads[column];
    const right = head.classList.contains("n");
    const ways = right ? ["descending", "ascending"] : ["ascending", "descending"];
    const way = [...ways, null][ways.indexOf(head.getAttribute("aria-sort")) + 1];
    for (const other of heads) other.removeAttribute("aria-sort");
    if (way) head.setAttribute("aria-sort", way);
    for (const { body, rows } of bodies) {
      const moved = document.createDocumentFragment();
      for (const row of way ? sorted(rows, column, right, way === "ascending" ? 1 : -1) : rows) moved.append(row);
      body.append(moved);
    }
  };

  heads.forEach((head, column) => {
    if (!head.textContent || head.classList.contains("sign")) return; // the bars are the column before
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => press(column));
  });
}

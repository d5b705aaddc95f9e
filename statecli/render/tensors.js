"use strict";
// The list of tensors: a tree of modules, or a flat list, with a filter. Rows are drawn when they come into view, and
// texts of the target are only ever set as textContent.
{
const data = JSON.parse(document.getElementById("tensor-data").textContent);
const element = (id) => document.getElementById(`tensors-${id}`);
const [section, grid, body, filter, status, detail] = ["section", "grid", "body", "filter", "status", "detail"].map(element);
const count = data.names.length;
const natural = new Intl.Collator("en", { numeric: true });
const MAX_LEVELS = 32;
const MAX_ROWS = 400000; // browsers limit the height of an element
const MAX_COPIED = 100000; // characters: Linux limits an argument to 131,072
const MIN_LABEL = 16; // characters of a name, however narrow the list
const NO_ENDS = { start: 0, end: 0 };
const MAX_PRINTED_ROWS = 2000;
const WIDTHS = { kind: 6.4, dtype: 6, shape: 6.9, elements: 6.4, bytes: 6.4, share: 6.6 }; // rem; of others 5
const ROWS_OUTSIDE = 8; // drawn above and below the view, so that a slow scroll shows no gap

const create = (tag, className = "", text = "") => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
};

// Numbers as the command line writes them.
const scaled = (value, units, base) => {
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) [value, at] = [value / 1000, at + 1];
  const digits = at === 0 ? String(value) : value < 99.95 ? String(Number(value.toPrecision(3))) : value.toFixed(0);
  return base + digits + (units[at] && ` ${units[at]}`);
};
const formatSize = (bytes) => scaled(bytes, ["B", "kB", "MB", "GB", "TB"], "");
const formatCount = (elements) => scaled(elements, ["", "K", "M", "B", "T"], "");
const formatShare = (share) => (share >= 0.9995 ? "100 %" : share >= 0.0995 ? `${(share * 100).toFixed(0)} %` : share >= 0.001 ? `${(share * 100).toFixed(1)} %` : share ? "<0.1 %" : "0 %");
const plural = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const formatNumber = (value) => (value === null ? "-" : Number.isInteger(value) && Math.abs(value) < 1e7 ? value.toLocaleString("en") : value && Math.abs(value) < 1e-4 ? value.toExponential(3).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4))));

const text = (column, row) => column.values[column.indices[row]];
const sharedBy = new Map(data.shared.map((entry) => [entry[0], entry]));
const rowsOfStorage = new Map();
for (const [row, storage] of data.shared) rowsOfStorage.set(storage, [...(rowsOfStorage.get(storage) || []), row]);
const twinsOf = (row) => (sharedBy.has(row) ? rowsOfStorage.get(sharedBy.get(row)[1]).filter((other) => other !== row) : []);

// Sums of a module, with the bytes of a storage counted once.
class Sum {
  constructor() {
    this.count = this.elements = this.bytes = 0;
    this.storages = null;
  }

  add(row) {
    let bytes = data.row_bytes[row];
    let elements = data.row_elements[row];
    this.count += 1;
    const shared = sharedBy.get(row);
    if (shared) {
      const [, storage, view, size] = shared;
      this.storages ||= new Map();
      if (!this.storages.has(storage)) this.storages.set(storage, { taken: 0, views: new Set() });
      const held = this.storages.get(storage);
      if (held.views.has(view)) return;
      held.views.add(view);
      const counted = Math.max(0, Math.min(bytes, size - held.taken));
      held.taken += counted;
      if (rowsOfStorage.get(storage).length > 1 && bytes) elements = Math.floor(elements * (counted / bytes));
      bytes = counted;
    }
    this.elements += elements;
    this.bytes += bytes;
  }
}

// The tree, built where it is opened. A node has all `rows` whose names begin with its path: its `own` tensor of exactly
// this name, and the `inner` rows below; `offset` is where the rest of their names begins. Several equal layers are one
// node with `members`.
const createNode = (name, path, rows, offset, level) => {
  const own = rows.filter((row) => data.names[row].length < offset);
  const inner = own.length ? rows.filter((row) => data.names[row].length >= offset) : rows;
  return { name, path, rows, own, inner, offset, level, members: null, children: null, sums: null, texts: {} };
};
const partEnd = (row, offset, level) => {
  const end = level >= MAX_LEVELS ? -1 : data.names[row].indexOf(".", offset);
  return end < 0 ? data.names[row].length : end;
};
const createRoot = (rows) => createNode("", "", rows, 0, 0);
const isOpenable = (node) => node.members !== null || node.inner.length > 0;
const sumOf = (node) => {
  if (!node.sums) {
    node.sums = new Sum();
    for (const row of node.inner) node.sums.add(row);
  }
  return node.sums;
};

// Of several equal layers: the sums of one.
const sumOfOne = (node) => {
  if (!node.members) return sumOf(node);
  if (!node.one) {
    node.one = new Sum();
    for (const row of node.members[0].rows) node.one.add(row);
  }
  return node.one;
};
const times = (node, text) => (node.members ? `${node.members.length.toLocaleString("en")} × ${text}` : text);

const groupBy = (items, key) => {
  const groups = new Map();
  for (const item of items) {
    const own = key(item);
    if (groups.has(own)) groups.get(own).push(item);
    else groups.set(own, [item]);
  }
  return groups;
};

const listChildren = (node) => {
  if (node.children) return node.children;
  if (node.members) return (node.children = node.members);
  if (node === tree && data.sections.values.length > 1) {
    const sections = groupBy(node.rows, (row) => text(data.sections, row));
    return (node.children = [...sections].map(([name, rows]) => createNode(name, `\n${name}`, rows, 0, 0)));
  }
  const parts = groupBy(node.inner, (row) => data.names[row].slice(node.offset, partEnd(row, node.offset, node.level)));
  const children = [...parts].map(([part, rows]) => createChild(node, part, rows));
  return (node.children = foldLayers(children, node));
};

// A module with nothing but another module is one node with it: `attention.self`.
const createChild = (parent, part, rows) => {
  let [name, end, level] = [part, parent.offset + part.length, parent.level + 1];
  for (;;) {
    const first = data.names[rows[0]];
    if (first.length === end) break;
    const next = first.slice(end, partEnd(rows[0], end + 1, level));
    if (!rows.every((row) => data.names[row].startsWith(next, end) && partEnd(row, end + 1, level) === end + next.length)) break;
    [name, end, level] = [name + next, end + next.length, level + 1];
  }
  return createNode(name, `${parent.path}\n${name}`, rows, end + 1, level);
};

const LAYER = /(?<![^.])(?:0|[1-9]\d{0,8})(?![^.])/g;
const foldLayers = (children, parent) => {
  const templates = groupBy(children, (child) => (child.name.match(LAYER) || []).length === 1 ? child.name.replace(LAYER, "#") : `\n${child.name}`);
  const keyed = (child) => child.rows.map((row) => [data.names[row].slice(child.offset - 1), ...[data.kinds, data.dtypes, data.shapes, data.moods].map((column) => column.indices[row])].join()).join("\n");
  const groups = new Map(); // in the order of the first layer
  for (const child of children) groups.set(child, [child]);
  for (const siblings of templates.values()) {
    if (siblings.length < 2) continue;
    for (const [first, ...others] of groupBy(siblings, keyed).values()) {
      groups.set(first, [first, ...others]);
      for (const other of others) groups.delete(other);
    }
  }
  return [...groups.values()].map((members) => (members.length > 1 ? joinMembers(members, parent) : members[0]));
};

const formatNumbers = (numbers) => {
  const runs = Globs.listRuns([...numbers].sort((a, b) => a - b));
  return `{${runs.slice(0, 6).join()}${runs.length > 6 ? `,… ${numbers.length} in all` : ""}}`;
};

const joinMembers = (members, parent) => {
  const numbers = formatNumbers(members.map((member) => Number(member.name.match(LAYER)[0])));
  const name = members[0].name.replace(LAYER, () => numbers);
  const joined = createNode(name, `${parent.path}\n${name}`, members.flatMap((member) => member.rows), 0, 0);
  joined.members = members;
  return joined;
};

// Columns: the text of a tensor, the text of a module, and what a column is sorted by.
const problemsOf = (row) => (text(data.problems, row) ? text(data.problems, row).split(", ") : []);
const countProblem = (row, word) => (word === "NaN" || word === "Inf" ? `${data.stats[word.toLowerCase()][row].toLocaleString("en")} ${word}` : word);
// "1 NaN, 8 outliers", the words of the verdict, with the sum of the numbers.
const countProblems = (rows) => {
  const counts = new Map(data.problem_words.map((word) => [word, 0]));
  if (data.problems.values.some(Boolean)) for (const row of rows) for (const word of problemsOf(row)) counts.set(word, counts.get(word) + 1);
  const found = [...counts].filter(([, number]) => number);
  return { total: found.reduce((sum, [, number]) => sum + number, 0), text: found.map(([word, number]) => (word === "outlier" ? plural(number, word) : `${number.toLocaleString("en")} ${word}`)).join(", ") };
};
const describeModule = (node, name, column) => {
  if (!(name in node.texts)) {
    const values = new Set(node.inner.map((row) => column.indices[row]));
    node.texts[name] = values.size === 1 ? column.values[column.indices[node.inner[0]]] : plural(values.size, name);
  }
  return node.texts[name];
};
const plainKind = (kind) => kind.replace(/\?$/, ""); // the question mark of an assumed kind
const textColumn = (name, column) => ({ name, text: (row) => plainKind(text(column, row)), module: (node) => plainKind(describeModule(node, name, column)), key: (row) => text(column, row), moduleKey: (node) => describeModule(node, name, column) });
const varies = (column) => column.values.length > 1;
const columns = [
  { name: "name", key: (row) => data.names[row], moduleKey: (node) => node.name },
  ...(varies(data.kinds) ? [textColumn("kind", data.kinds)] : []),
  ...(varies(data.dtypes) ? [textColumn("dtype", data.dtypes)] : []),
  { name: "shape", text: (row) => text(data.shapes, row), module: (node) => times(node, sumOfOne(node).count < 10000 ? plural(sumOfOne(node).count, "tensor") : `${formatCount(sumOfOne(node).count)} tensors`), key: (row) => text(data.shapes, row), moduleKey: (node) => sumOfOne(node).count },
  ...("min" in data.stats ? [] : [{ name: "elements", right: true, text: (row) => formatCount(data.row_elements[row]), module: (node) => times(node, formatCount(sumOfOne(node).elements)), key: (row) => data.row_elements[row], moduleKey: (node) => sumOfOne(node).elements }]),
  { name: "bytes", right: true, text: (row) => formatSize(data.row_bytes[row]), module: (node) => times(node, formatSize(sumOfOne(node).bytes)), key: (row) => data.row_bytes[row], moduleKey: (node) => sumOfOne(node).bytes },
  ...["min", "max", "mean", "std"].filter((name) => name in data.stats).map((name) => ({ name, right: true, text: (row) => formatNumber(data.stats[name][row]), module: () => "", key: (row) => data.stats[name][row], moduleKey: (node) => summarize(name, node) })),
  { name: "share", right: true, bar: true, text: (row) => formatShare(data.row_bytes[row] / (data.bytes || 1)), module: (node) => formatShare(sumOf(node).bytes / (data.bytes || 1)), key: (row) => data.row_bytes[row], moduleKey: (node) => sumOf(node).bytes },
];
const summarize = (name, node) => {
  const numbers = node.inner.map((row) => data.stats[name][row]).filter((value) => value !== null);
  return numbers.length ? numbers.reduce((a, b) => Math.max(a, b)) : null;
};

const filters = Filters.create(data);

// What is shown: rows of the view, and the state that they follow from.
let view = [];
let matches = [];
let tree = null;
let isTree = true;
let commonEnds = NO_ENDS; // of the names in the list
let sort = null; // {column, down}
let active = 0;
let detailRow = -1; // of the facts
let rowHeight = 0;
let labelCells = 0; // characters of a name that fit
const opened = new Set();

const compareKeys = (a, b) => {
  if (a === null || b === null || a === undefined || b === undefined) return 0;
  return typeof a === "number" && typeof b === "number" ? a - b : natural.compare(String(a), String(b));
};
const sortBy = (items, key) => {
  if (!sort) return items;
  const keyed = items.map((item) => ({ item, key: key(item) }));
  // Rows without a number stay last in both directions.
  const isMissing = (entry) => entry.key === null || entry.key === undefined;
  keyed.sort((a, b) => isMissing(a) - isMissing(b) || (sort.down ? -1 : 1) * compareKeys(a.key, b.key));
  return keyed.map((entry) => entry.item);
};

const listView = () => {
  if (!isTree) commonEnds = Names.findCommonEnds(matches.map(nameOf));
  if (!isTree) return sortBy(matches, (row) => sort.column.key(row)).map((row) => ({ row, level: 1, node: null, label: nameOf(row) }));
  const rows = [];
  const visit = (node, level) => {
    const children = sortBy(listChildren(node), (child) => (isOpenable(child) ? sort.column.moduleKey(child) : sort.column.key(child.own[0])));
    for (const child of children) {
      if (!child.members) for (const row of child.own) rows.push({ row, level, node: null, label: child.name });
      if (!isOpenable(child)) continue;
      rows.push({ row: -1, level, node: child, label: child.name });
      if (opened.has(child.path)) visit(child, level + 1);
    }
  };
  visit(tree, 1);
  return rows;
};
const nameOf = (row) => sectionPrefix(row) + data.names[row];
const sectionPrefix = (row) => (data.sections.values.length > 1 ? `${text(data.sections, row)}: ` : "");

// Opens modules from the top as long as few rows are shown, so that a reader sees more than one closed module.
const openFirst = () => {
  let nodes = [tree];
  let isOnly = true; // the only row is a closed module
  for (let level = 0; level < MAX_LEVELS; level += 1) {
    const children = nodes.flatMap(listChildren);
    if (!children.length || (children.length > 12 && !isOnly)) return;
    isOnly = children.length === 1;
    for (const node of nodes) opened.add(node.path);
    nodes = children.filter((child) => isOpenable(child) && !child.members);
  }
};
const openAll = (node) => {
  opened.add(node.path);
  for (const child of listChildren(node)) if (isOpenable(child)) openAll(child);
};

const applyFilter = () => {
  const entered = filter.value.trim();
  const found = filters.find(entered);
  filter.toggleAttribute("aria-invalid", Boolean(found.problem));
  matches = found.rows;
  tree = null;
  refresh(true);
  const sum = new Sum();
  if (entered) for (const row of matches) sum.add(row);
  const same = [data.kinds, data.dtypes].filter((column) => !varies(column)).map((column) => (/\?$/.test(column.values[0]) ? `kind assumed: ${plainKind(column.values[0])}` : `all ${column.values[0]}`));
  const problems = countProblems(matches);
  status.className = found.problem ? "status bad" : "status";
  status.textContent = found.problem || (entered
    ? `${matches.length.toLocaleString("en")} of ${plural(count, "tensor")}, ${formatSize(sum.bytes)} of ${formatSize(data.bytes)}`
    : [plural(count, "tensor"), ...same, ...(problems.total ? [`${plural(problems.total, "problem")}: ${problems.text}`] : [])].join(", "));
};

const refresh = (isNew) => {
  if (isTree && !tree) {
    tree = createRoot(matches);
    if (matches.length === count) openFirst();
    else if (matches.length <= 500) openAll(tree);
  }
  const held = view[active];
  view = listView();
  const at = held && !isNew ? view.findIndex((entry) => (held.node ? entry.node === held.node : entry.row === held.row && !entry.node)) : 0;
  active = Math.max(0, at);
  if (isNew) grid.scrollTop = 0;
  grid.setAttribute("aria-rowcount", String(view.length + 1));
  element("more").textContent = view.length > MAX_ROWS ? `The first ${MAX_ROWS.toLocaleString("en")} rows are shown. Filter to see others.` : "";
  if (view.length > MAX_ROWS) view.length = MAX_ROWS;
  body.style.height = `${view.length * rowHeight}px`;
  if (isNew) followDetail();
  draw();
  uncover();
};
// The facts stay with a tensor that is in view in the new list, and close with any other.
const followDetail = () => {
  if (detail.hidden) return;
  const at = view.findIndex((entry) => !entry.node && entry.row === detailRow);
  if (at >= 0 && (at + 1) * rowHeight + grid.firstElementChild.offsetHeight <= grid.clientHeight) active = at;
  else hideDetail();
};
const hideDetail = () => { detail.hidden = true; };

const drawCell = (column, entry, share) => {
  const cell = create("div", column.right ? "cell n" : "cell");
  cell.setAttribute("role", "gridcell");
  cell.dataset.column = column.name;
  const shown = create("span", "", entry.node ? column.module(entry.node) : column.text(entry.row));
  if (column.bar) {
    const bar = create("span", "share");
    const fill = create("span", "fill");
    fill.style.width = `${Math.min(100, share * 100)}%`;
    bar.append(fill);
    cell.append(bar);
  }
  cell.append(shown);
  return cell;
};

const createLabel = (name, fitting) => {
  const label = create("span", "label");
  for (const [part, isCut] of Names.cut(name, isTree ? NO_ENDS : commonEnds, Math.max(MIN_LABEL, fitting))) label.append(create("span", isCut ? "cut" : "", part));
  return label;
};

const drawRow = (entry, at) => {
  const line = create("div", `row${entry.node ? " module" : ""}`);
  const mood = entry.node ? "" : text(data.moods, entry.row);
  if (mood) line.classList.add(mood);
  line.id = `tensors-row-${at}`;
  line.setAttribute("role", "row");
  line.setAttribute("aria-rowindex", String(at + 2));
  line.setAttribute("aria-level", String(entry.level));
  line.setAttribute("aria-selected", String(at === active));
  if (entry.node) line.setAttribute("aria-expanded", String(opened.has(entry.node.path)));
  line.style.top = `${at * rowHeight}px`;
  const name = create("div", "cell name");
  name.setAttribute("role", "rowheader");
  name.style.paddingLeft = `${(entry.level - 1) * 1.1}em`;
  name.append(create("span", entry.node ? "twist" : "twist none"));
  name.title = entry.node ? "" : nameOf(entry.row);
  if (entry.node) {
    if (entry.node.members) name.title = `${entry.node.members.length.toLocaleString("en")} modules with the same names, dtypes and shapes; sorted by the size of one`;
    const problems = countProblems(entry.node.inner).text;
    if (problems) name.append(create("span", "problems", problems));
  } else {
    const problems = problemsOf(entry.row);
    if (problems.length) name.append(create("span", "problems", problems.map((word) => countProblem(entry.row, word)).join(", ")));
    const [twin, ...others] = twinsOf(entry.row);
    if (twin !== undefined) {
      const link = create("button", "link", `= ${data.names[twin]}`);
      link.type = "button";
      link.tabIndex = -1;
      link.setAttribute("aria-label", `shares storage with ${data.names[twin]}: go there`);
      link.addEventListener("click", (event) => { event.stopPropagation(); reveal(twin); });
      name.append(link);
      if (others.length) name.append(create("span", "remark", `+ ${others.length}`));
    }
    // What the problem says already is left out of the remark.
    const facts = text(data.remarks, entry.row).replace(/^outlier: /, "").split(", ").filter((fact) => !/^[\d,]+ (nan|inf)$/.test(fact));
    const remark = [varies(data.devices) ? text(data.devices, entry.row) : "", ...facts].filter(Boolean).join(", ");
    if (remark) name.append(create("span", "remark", remark));
  }
  // The label has the room that texts without a cut leave.
  const texts = [...name.querySelectorAll(".problems")].map((e) => e.textContent.length + 1);
  const room = labelCells - 2 * entry.level - (name.children.length > 1) - texts.reduce((a, b) => a + b, 0);
  name.firstChild.after(createLabel(entry.label, room));
  const share = (entry.node ? sumOf(entry.node).bytes : data.row_bytes[entry.row]) / (data.bytes || 1);
  line.append(name, ...columns.slice(1).map((column) => drawCell(column, entry, share)));
  line.addEventListener("click", () => { active = at; activate(); });
  return line;
};

const draw = (first = null, last = null) => {
  const start = first ?? Math.max(0, Math.floor(grid.scrollTop / rowHeight) - ROWS_OUTSIDE);
  const end = last ?? Math.min(view.length, Math.ceil((grid.scrollTop + grid.clientHeight) / rowHeight) + ROWS_OUTSIDE);
  body.replaceChildren(...view.slice(start, end).map((entry, offset) => drawRow(entry, start + offset)));
  if (active >= start && active < end) grid.setAttribute("aria-activedescendant", `tensors-row-${active}`);
  else grid.removeAttribute("aria-activedescendant");
  const cut = body.querySelector('[aria-selected="true"] .label .cut');
  const current = view[active];
  element("whole").textContent = cut && current ? (current.node ? current.label : nameOf(current.row)) : "";
};

const moveTo = (at) => {
  active = Math.max(0, Math.min(view.length - 1, at));
  scrollToActive();
  draw();
  uncover();
};
const scrollToActive = () => {
  const top = active * rowHeight;
  const head = grid.firstElementChild.offsetHeight;
  if (top < grid.scrollTop) grid.scrollTop = top;
  else if (top + rowHeight + head > grid.scrollTop + grid.clientHeight) grid.scrollTop = top + rowHeight + head - grid.clientHeight;
};

const toggle = (node, open) => {
  if (open) opened.add(node.path);
  else opened.delete(node.path);
  refresh(false);
};

const activate = () => {
  const entry = view[active];
  if (!entry) return;
  if (entry.node) return toggle(entry.node, !opened.has(entry.node.path));
  showDetail(entry.row);
  scrollToActive(); // the facts leave less room for the list
  draw();
  uncover();
};

// Shows a tensor wherever it is: opens its modules, and drops a filter that hides it.
const reveal = (row) => {
  if (!matches.includes(row)) {
    filter.value = "";
    applyFilter();
  }
  if (isTree) {
    const visit = (node) => {
      for (const child of listChildren(node)) {
        if (!child.rows.includes(row)) continue;
        opened.add(child.path);
        visit(child);
      }
    };
    visit(tree);
    refresh(false);
  }
  showDetail(row);
  moveTo(view.findIndex((entry) => !entry.node && entry.row === row));
  grid.focus({ preventScroll: true });
};
// The facts lie over the end of the list, and must not hide the selected row.
const uncover = () => {
  const hidden = (body.querySelector('[aria-selected="true"]')?.getBoundingClientRect().bottom ?? 0) - detail.getBoundingClientRect().top;
  if (!detail.hidden && hidden > 0) scrollBy(0, hidden);
};

// Copies the rows of the filter, or the row at the cursor without a filter; shows the text, because a browser may refuse.
const copyGlobs = async (rows) => {
  const shown = element("copied");
  if (!otherNames) {
    otherNames = new Map((data.other_names || []).map(([row, names]) => [row, [...names]]));
    filters.wholeNames.forEach((own, row) => { if (own !== data.names[row]) otherNames.set(row, [...(otherNames.get(row) || []), data.names[row]]); });
  }
  const globs = rows.length ? Globs.write(filters.wholeNames, otherNames, [...rows].sort((a, b) => a - b)) : null;
  const count = plural(rows.length, "tensor");
  const written = globs ? Globs.format(globs) : "";
  const isShown = globs !== null && written.length <= MAX_COPIED;
  element("globs").value = isShown ? written : "";
  element("globs").hidden = !isShown;
  shown.hidden = false;
  if (!isShown) {
    const why = globs ? `These ${count} need ${globs.length.toLocaleString("en")} globs, too many for a command line` : `Globs cannot select only these ${count}`;
    element("told").textContent = rows.length ? `${why}: change the filter.` : "No tensor is listed.";
    return;
  }
  const area = element("globs");
  for (area.rows = 1; area.rows < 8 && area.scrollHeight > area.clientHeight; ) area.rows += 1;
  element("globs").select();
  const isCopied = await navigator.clipboard?.writeText(element("globs").value).then(() => true, () => false) || document.execCommand("copy");
  element("told").textContent = isCopied ? `Copied, for ${count}:` : `Copy this text, for ${count}:`;
};
let otherNames = null;
const listCurrent = () => (view[active]?.node ? view[active].node.rows : view[active] ? [view[active].row] : []);

const LEVELS = ["1 %", "5 %", "25 %", "50 %", "75 %", "95 %", "99 %"];
const addDistribution = (distribution, add) => {
  if (!distribution) return;
  for (const [name, index] of [["first NaN at", distribution.first_nan], ["first Inf at", distribution.first_inf]]) if (index) add(name, `[${index}]`);
  if (distribution.reason) return add("values", distribution.reason);
  if (distribution.quantiles) add("quantiles", distribution.quantiles.map((value, at) => `${LEVELS[at]}: ${formatNumber(value)}`.replaceAll(" ", "\u00a0")).join("   "), true);
  if (distribution.first) add("first values", distribution.first.map((value) => (value === null ? "NaN or Inf" : formatNumber(value))).join(", "), true);
  if (!distribution.counts) return;
  const { counts, low, high } = distribution;
  const most = counts.reduce((a, b) => Math.max(a, b));
  const edge = (n) => formatNumber(low + (high - low) * (n / counts.length));
  const bars = counts.map((number, at) => [number, `${edge(at)} to ${edge(at + 1)}: ${number.toLocaleString("en")} values`]);
  const label = `histogram of ${counts.length} bins from ${formatNumber(low)} to ${formatNumber(high)}, at most ${most.toLocaleString("en")} values in a bin`;
  drawBars("histogram", bars, label, [formatNumber(low), formatNumber(high)]);
};

// Bars with the same distance: a number and a text each. `ends` stand below the first and the last bar.
const drawBars = (name, bars, label, ends) => {
  const most = bars.reduce((largest, [number]) => Math.max(largest, number), 0);
  const figure = create("div", "spread");
  const drawing = element("canvas").cloneNode(false);
  for (const attribute of ["id", "aria-hidden"]) drawing.removeAttribute(attribute);
  const attributes = { class: "histogram", role: "img", viewBox: `0 0 ${bars.length * 8} 64`, preserveAspectRatio: "none", "aria-label": label };
  for (const [key, value] of Object.entries(attributes)) drawing.setAttribute(key, value);
  bars.forEach(([number, text], at) => {
    const height = number ? Math.max(1, (number / most) * 60) : 0;
    const [bar, title] = ["rect", "title"].map((tag) => document.createElementNS(drawing.namespaceURI, tag));
    title.textContent = text;
    for (const [key, value] of Object.entries({ class: "bar", x: at * 8, y: 64 - height, width: 7, height })) bar.setAttribute(key, value);
    bar.append(title);
    drawing.append(bar);
  });
  figure.append(create("b", "", name), drawing, ...ends.map((end) => create("span", "", end)));
  element("figures").append(figure);
};

const addRanks = (spectrum, add) => {
  if (!spectrum) return;
  if (spectrum.reason) return add("singular values", `not computed: ${spectrum.reason}`, true);
  add("rank", `${spectrum.rank.toLocaleString("en")} of ${spectrum.count.toLocaleString("en")}`);
  add("stable rank", formatNumber(spectrum.stable_rank ?? null));
};
const drawSpectrum = (spectrum) => {
  if (!spectrum || spectrum.reason) return;
  const { count, ranks, values } = spectrum;
  const bars = values.map((value, at) => [value, `singular value ${ranks[at].toLocaleString("en")}: ${formatNumber(value)}`]);
  const label = `${plural(values.length, "singular value")} of ${count.toLocaleString("en")}, from ${formatNumber(values[0])} to ${formatNumber(values[values.length - 1])}`;
  drawBars(`singular values 1 to ${count.toLocaleString("en")}`, bars, label, [formatNumber(values[0]), formatNumber(values[values.length - 1])]);
};

const showDetail = (row) => {
  detailRow = row;
  const facts = element("facts");
  facts.replaceChildren();
  element("figures").replaceChildren();
  const add = (name, value, isWide = false, isFirst = false) => {
    if (value === "" || value === "-" || value === null) return;
    const [pair, shown] = [create("div", isWide ? "wide" : isFirst ? "first" : ""), create("dd")];
    shown.append(value);
    pair.append(create("dt", "", name), shown);
    facts.append(pair);
  };
  element("title").textContent = data.names[row];
  if (data.sections.values.length > 1) add("section", text(data.sections, row));
  const kind = text(data.kinds, row);
  add("kind", kind === plainKind(kind) ? kind : `${plainKind(kind)}, assumed`);
  add("dtype", text(data.dtypes, row));
  add("shape", text(data.shapes, row));
  add("elements", data.row_elements[row].toLocaleString("en"));
  add("bytes", `${data.row_bytes[row].toLocaleString("en")} (${formatShare(data.row_bytes[row] / (data.bytes || 1)).replace(" ", "\u00a0")})`);
  add("device", text(data.devices, row));
  add("assigned at", text(data.origins, row));
  add("remark", text(data.remarks, row), true);
  for (const [name, values] of Object.entries(data.stats)) add(name, typeof values[row] === "string" ? values[row] : formatNumber(values[row]), name === "reason", name === "min");
  const spectrum = data.spectra?.[row];
  addRanks(spectrum, add);
  if (data.values_command) add("values", `not read; to read them: ${data.values_command}`, true);
  if (data.distributions) addDistribution(data.distributions[row], add);
  drawSpectrum(spectrum);
  const twins = twinsOf(row);
  if (twins.length) {
    const links = create("span", "links");
    for (const twin of twins.slice(0, 50)) {
      const link = create("button", "link", data.names[twin]);
      link.type = "button";
      link.addEventListener("click", () => reveal(twin));
      links.append(link);
    }
    if (twins.length > 50) links.append(create("span", "", `and ${twins.length - 50} more`));
    add("shares storage with", links, true);
  }
  detail.hidden = false;
};

// Keys, clicks and sizes.
grid.addEventListener("keydown", (event) => {
  if (event.target !== grid || event.ctrlKey || event.metaKey || event.altKey) return;
  const entry = view[active];
  const page = Math.max(1, Math.floor(grid.clientHeight / rowHeight) - 2);
  const moves = { ArrowDown: active + 1, ArrowUp: active - 1, PageDown: active + page, PageUp: active - page, Home: 0, End: view.length - 1 };
  if (event.key in moves) moveTo(moves[event.key]);
  else if (event.key === "Enter" || event.key === " ") activate();
  else if (event.key === "ArrowRight" && entry && entry.node) {
    if (opened.has(entry.node.path)) moveTo(active + 1);
    else toggle(entry.node, true);
  } else if (event.key === "ArrowLeft" && entry) {
    if (entry.node && opened.has(entry.node.path)) toggle(entry.node, false);
    else moveTo(view.findLastIndex((other, at) => at < active && other.level < entry.level));
  } else if (event.key === "Escape") hideDetail();
  else if (event.key === "y") copyGlobs(listCurrent());
  else return;
  event.preventDefault();
});

const heads = element("head");
for (const column of columns) {
  const head = create("div", column.right ? "cell n" : "cell");
  head.setAttribute("role", "columnheader");
  head.dataset.column = column.name;
  const button = create("button", "", column.name);
  button.type = "button";
  button.addEventListener("click", () => {
    const isSame = sort && sort.column === column;
    const startsDown = Boolean(column.right);
    sort = !isSame ? { column, down: startsDown } : sort.down === startsDown ? { column, down: !startsDown } : null;
    for (const other of heads.children) other.removeAttribute("aria-sort");
    if (sort) head.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
    refresh(true);
  });
  head.append(button);
  heads.append(head);
}
grid.setAttribute("aria-colcount", String(columns.length));
grid.dataset.columns = columns.length > 7 ? "many" : "few";
grid.style.setProperty("--columns", columns.slice(1).map((column) => `${WIDTHS[column.name] || 5}rem`).join(" "));

const setView = (asTree) => {
  isTree = asTree;
  element("tree").setAttribute("aria-pressed", String(asTree));
  element("flat").setAttribute("aria-pressed", String(!asTree));
  for (const id of ["open", "close"]) element(id).disabled = !asTree;
  refresh(true);
};
element("tree").addEventListener("click", () => setView(true));
element("flat").addEventListener("click", () => setView(false));
element("open").addEventListener("click", () => { openAll(tree); refresh(false); });
element("close").addEventListener("click", () => { opened.clear(); refresh(true); });
element("copy").addEventListener("click", () => {
  applyTyped();
  copyGlobs(filter.value.trim() ? matches : listCurrent());
});
element("forget").addEventListener("click", () => { element("copied").hidden = true; element("copy").focus(); });
element("hide").addEventListener("click", () => { hideDetail(); grid.focus({ preventScroll: true }); });

let timer = 0;
const applyTyped = () => {
  if (!timer) return;
  clearTimeout(timer);
  timer = 0;
  applyFilter();
};
filter.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(applyTyped, count > 20000 ? 150 : 0);
});
let isQueued = false;
grid.addEventListener("scroll", () => {
  if (isQueued) return;
  isQueued = true;
  requestAnimationFrame(() => { isQueued = false; draw(); });
});
const measureRows = () => {
  rowHeight = element("ruler").offsetHeight || 28;
  const isNarrow = !heads.querySelector('[data-column="shape"]').offsetWidth; // the name has a line of its own
  const width = isNarrow ? heads.clientWidth - 24 : heads.firstElementChild.clientWidth;
  labelCells = Math.floor(width / (element("ruler").offsetWidth / 10 || 8));
};
const measure = () => {
  measureRows();
  body.style.height = `${view.length * rowHeight}px`;
  draw();
};
addEventListener("resize", measure);
addEventListener("beforeprint", () => { rowHeight = 24; draw(0, Math.min(view.length, MAX_PRINTED_ROWS)); });
addEventListener("afterprint", measure);

// Addresses: #tensor=h.0.weight shows a tensor, #filter=nan>0 filters.
const follow = (address) => {
  const [, key, value] = /^#(tensor|filter)=(.*)$/s.exec(address) || [];
  let entered = "";
  try {
    entered = decodeURIComponent(value || "");
  } catch {
    return; // not an address of ours
  }
  const row = key === "tensor" ? data.names.findIndex((_, at) => nameOf(at) === entered) : -1;
  if (key === "filter") {
    filter.value = entered;
    applyFilter();
    filter.focus({ preventScroll: true });
  } else if (row >= 0) reveal(row);
  else return;
  section.scrollIntoView();
  uncover();
};
addEventListener("hashchange", () => follow(location.hash));
addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='#']");
  if (link && link.hash === location.hash) follow(link.hash);
});

section.classList.remove("waiting");
measureRows();
applyFilter();
follow(location.hash);
}

// What report/page.py and the panels write into the page, and what its scripts hand to each other. Checked by `make lint`.

type Severity = "error" | "warning" | "info";
type Steps = ArrayLike<number>;

interface Labelled { label: string; value: string }
interface Place { panel: string; row: number | null; column: string | null; step: number | null; layer?: string | null }
interface SparklineData { path: string; steps: number[]; values: (number | null)[]; cuts: number[]; sampled: boolean; log: boolean; step: number | null }
interface EvidenceData { path: string; label: string; step: string; value: string; place: Place | null }
interface Finding {
  rule: string; version: number; severity: Severity; step: number | null; title: string; detail: string; where: Labelled[];
  evidence: EvidenceData[]; line: SparklineData | null; fix: string; refuted: string; overridden: string[];
}
interface Verdict {
  tone: Severity | "clear" | "unmeasured"; headline: string; detail: string; status: string; about: string[]; lines: string[]; losses: string[];
  lead: number | null; figures: (Labelled & { note: string })[];
  unmeasured: { what: { text: string; panel: string | null }[]; reason: string; names: string[] }[];
}
interface Parameter { name: string; shape: string; numel: number; dtype: string; module: string; aliases: string[]; group: string }
// One of `stated`, `missing` and `kind` with `data`; a live page gets facts, remarks and data later.
interface Panel {
  name: string; title: string; note: string; place: "full" | "half" | "details"; stated?: string; missing?: string; kind?: string;
  facts?: Labelled[]; remarks?: string[]; data?: any;
}
interface ReportData {
  steps: [number, number]; across?: string; run: { name: string; status: string }; verdict: Verdict | null; findings: Finding[]; hints: Finding[];
  pages: Record<string, [string, string][]>; attempts: number[]; parameters: Parameter[]; reasons: Record<string, string>;
  precision: string; version: string; panels: Panel[];
  live?: { views: { key: string; name: string; here: boolean }[] };
  column?: (name: string) => Promise<ColumnData>;
}
interface News extends ReportData { news: number; table: string; stand: { word: string; detail: string; over: boolean } }

// report/charts.py: `odd` and `gap` are places, not finite and not measured; `breaks` and `sampled` are pairs of steps.
interface LineData {
  label: string; axis: "left" | "right"; style: string; tone: string; over?: number; downTo?: string; values: ArrayLike<number>;
  odd: Steps; gap?: Steps; breaks?: Steps; sampled?: Steps; every?: number;
}
interface AxisData { label: string; log: boolean; base?: number; low: number | null; high: number | null; top?: number | null }
interface Span { label: string; mark: string; after: number; by: number; tone: string }
interface ChartData {
  title: string; steps: Steps; range: number; lines: LineData[]; left: AxisData; right: AxisData | null;
  marks: { label: string; steps: Steps }[]; spans: Span[]; across: string; names: string[]; adjustable: boolean;
}

// A chart that is drawn: `says` writes out a place of the horizontal axis, `empty` is shown instead of lines.
interface Line extends LineData {
  values: any; odd: number[]; gap?: number[]; breaks?: number[]; sampled?: number[]; digits?: number; smooths?: number; says?: ArrayLike<number>;
  fill?: number; opacity?: number; colour?: () => string; places?: number[]; known?: number[]; alone?: number[]; apart?: number[]; cuts?: number[][];
}
interface Spec extends Partial<Omit<ChartData, "lines" | "left">> {
  title: string; steps: any; lines: Line[]; left: AxisData & { whole?: boolean; fixed?: number[] }; right: AxisData | null;
  marks: { label: string; steps: any }[]; overSteps: boolean; says?: ((place: number) => string) | null; empty?: string;
  xAxis?: any; xRange?: () => number[];
}
interface ChartState {
  spec?: Spec; plot?: any; legend?: any; figure?: HTMLElement; hidden?: Set<string>; log?: boolean; smooth?: boolean; whole?: boolean;
}

// The heat map: values [parameters, ranges of steps]; `window` is true where a live page asked for some steps closely.
interface ColumnData { name: string; series: string; label: string; scale: "log" | "share" | "count"; meaning: string; high: any; low: any }
interface ParameterData {
  columns: ColumnData[]; first: Int32Array; last: Int32Array; recorded: Int32Array; exact: boolean; precise: boolean; window?: boolean;
  measured: Record<string, Uint16Array>; broken: Record<string, Uint16Array>; stats: Record<string, Float64Array>;
  gaps: Record<string, { breaks: number[]; sampled: number[]; every: number }>;
}
interface ParameterGrid extends ParameterData {}
// `code` is the colour of a cell and `merge` that of two that share a pixel; `block` is the beginning of a label that neighbours
// share, `marked` are rows to point out, `chosen` is the framed row, `lines` are drawn between rows.
interface GridOptions {
  name: string; gutter?: number; rows(): number[]; height(rows: number): number; code(row: number, bucket: number): number;
  merge(a: number, b: number): number; label(row: number): string; group(row: number): string[]; block?(row: number): string;
  describe(row: number, bucket: number): { title: string; rows: string[][] }; marked?(): number[]; chosen?(): number | null;
  pick?(row: number, bucket: number | null): void; zoomRows?(rows: number[] | null): void; lines?(): { place: number; label: string }[];
}
interface Planes { high: Float64Array; low: Float64Array }
interface ColourRange { low: number; high: number; log: boolean; clamped: boolean[] }
interface Cells { column: ColumnData; planes: Planes; range: ColourRange | null; amount: number; codes: Uint8Array; merge: GridOptions["merge"] }
interface RosterColumn { key: string; label: string; of?: (row: number) => any; show?: (value: any, row: number) => string; up?: boolean }
interface SpectraData { fields: string[]; values: string[]; numbers: string[]; labels: [string, string][]; charts: SpectraChart[]; layers: LayerData[] }
// Arrays [steps, fields or values or numbers, directions or ranks].
interface LayerData {
  name: string; shape: string; steps: Int32Array; directions: Int32Array; ranks: Int32Array; figures: Float64Array; table: Float32Array; spectrum: Float32Array;
}

// monitors/spectra/charts.py: lines are label, style, tone, column; a band is label, tone, lower and upper column.
interface SpectraChart {
  title: string; across: string; up: string; x: string; lines: string[][]; band: string[] | null; log_x: boolean; log_y: boolean;
}

interface TableData {
  name: string; heads?: any[]; figures?: number[]; rows: any[][]; id?: string | null; first?: number; kind?: string;
  sort?: { column: number; down: boolean; by: (column: number) => void } | null; row?: (place: number) => Record<string, any>;
}

// Draws a panel in `body`, again when there is newer data; `state` lives as long as the panel.
type Drawer = (body: HTMLElement, data: any, state: any) => void | Promise<void>;
interface Part { section: HTMLElement; body: HTMLElement; stamp: string; version: number; near: boolean; coarse: boolean }
interface Listener { listener: () => unknown; owner: Element }
declare const uPlot: any;

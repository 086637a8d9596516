//! Opens a pack of test vectors, hands its cases to an engine, and judges what the engine gives. No crates.
//!
//! ```ignore
//! mod vectors;
//! fn engine(c: &mut vectors::Case) -> Result<bool, String> {
//!     if c.operation != "rms_norm" { return Ok(false); } // not supported
//!     let y = my_rms_norm(&c.f32("x")?, &c.f32("gain")?, c.num("eps", 0.0), c.shape("x")?);
//!     c.set("y", y)
//! }
//! fn main() { std::process::exit(vectors::run("vectors", "", engine, &mut std::io::stdout(), None).map_or(2, |failed| (failed > 0) as i32)); }
//! ```
//!
//! A pack is a folder that `bitnet-np vectors` writes; its page says what each case asks. This file decides as vectors.h does: limits are
//! those of `bitnet-np check`. What a pack holds is not trusted: a damaged one is an error.
#![allow(dead_code)]

use std::io::Write;

/// An array of a case. data: little-endian, in C order.
pub struct Array<'p> {
    pub name: String,
    pub kind: String,
    pub shape: Vec<usize>,
    pub data: &'p [u8],
}

pub struct Output {
    pub name: String,
    pub rule: String,
    /// What the engine gave; NaN before.
    pub numbers: Vec<f32>,
}

pub struct Case<'p> {
    pub id: String,
    pub operation: String,
    pub arrays: Vec<Array<'p>>,
    pub words: Vec<(String, String)>,
    pub outputs: Vec<Output>,
}

pub struct Pack {
    pub version: String,
    lines: Vec<String>,
    files: Vec<Vec<u8>>,
}

impl<'p> Case<'p> {
    /// An array by its name.
    pub fn get(&self, name: &str) -> Result<&Array<'p>, String> {
        self.arrays.iter().find(|a| a.name == name).ok_or(format!("case {}: there is no array {name}", self.id))
    }
    pub fn shape(&self, name: &str) -> Result<&[usize], String> {
        Ok(&self.get(name)?.shape)
    }
    /// The numbers of an array of float32.
    pub fn f32(&self, name: &str) -> Result<Vec<f32>, String> {
        Ok(self.of(name, "f32")?.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
    }
    /// The numbers of an array of int32.
    pub fn i32(&self, name: &str) -> Result<Vec<i32>, String> {
        Ok(self.of(name, "i32")?.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect())
    }
    fn f64(&self, name: &str) -> Result<Vec<f64>, String> {
        Ok(self.of(name, "f64")?.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect())
    }
    fn of(&self, name: &str, kind: &str) -> Result<&'p [u8], String> {
        let a = self.get(name)?;
        if a.kind == kind { Ok(a.data) } else { Err(format!("case {}: {name} is of {}, expected {kind}", self.id, a.kind)) }
    }
    /// A number of the operation, such as eps; otherwise where the case has none.
    pub fn num(&self, name: &str, otherwise: f64) -> f64 {
        self.f64(name).ok().filter(|x| x.len() == 1).map_or(otherwise, |x| x[0])
    }
    /// An option that is no number, such as the type of a matrix; "" where the case has none.
    pub fn word(&self, name: &str) -> &str {
        self.words.iter().find(|w| w.0 == name).map_or("", |w| &w.1)
    }
    /// What the engine gives for an output, in C order. Always Ok(true): the case is done.
    pub fn set(&mut self, name: &str, numbers: Vec<f32>) -> Result<bool, String> {
        let id = self.id.clone();
        let o = self.outputs.iter_mut().find(|o| o.name == name).ok_or(format!("case {id}: there is no output {name}"))?;
        if o.numbers.len() != numbers.len() {
            return Err(format!("case {id}: {name} has {} numbers, expected {}", numbers.len(), o.numbers.len()));
        }
        o.numbers = numbers;
        Ok(true)
    }
}

// --- reading ---

fn checksum(data: &[u8]) -> u64 {
    let mut total = 0xCBF29CE484222325u64;
    for part in data.chunks(8) {
        let mut word = [0u8; 8];
        word[..part.len()].copy_from_slice(part);
        total = (total ^ u64::from_le_bytes(word)).wrapping_mul(0x100000001B3);
    }
    total ^ data.len() as u64
}

fn size(word: &str) -> Result<usize, String> {
    let digits = !word.is_empty() && word.len() <= 15 && word.bytes().all(|b| b.is_ascii_digit());
    if digits { word.parse().map_err(|_| format!("{word} is too large here")) } else { Err(format!("{word} is no size")) }
}

fn read(dir: &str, name: &str) -> Result<Vec<u8>, String> {
    std::fs::read(format!("{dir}/{name}")).map_err(|error| format!("{dir}/{name} cannot be read: {error}"))
}

impl Pack {
    /// Open a pack: its index and all its files are read and their checksums compared.
    pub fn open(dir: &str) -> Result<Pack, String> {
        let index = read(dir, "vectors.txt")?;
        let end = index.len().checked_sub(21).ok_or("vectors.txt is cut short")?;
        if index[end..] != *format!("end {:016x}\n", checksum(&index[..end])).as_bytes() {
            return Err(format!("{dir}/vectors.txt is damaged: its checksum is another"));
        }
        let text = std::str::from_utf8(&index[..end]).map_err(|_| "vectors.txt is no text")?;
        let fine = |word: &str| (1..64).contains(&word.len()) && word.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.+/".contains(&b));
        let lines: Vec<String> = text.lines().map(String::from).collect();
        if let Some(n) = lines.iter().position(|line| !line.split(' ').all(fine)) {
            return Err(format!("vectors.txt, line {}: no words", n + 1));
        }
        let first: Vec<&str> = lines.first().map_or(vec![], |line| line.split(' ').collect());
        let ["bitnet_np-vectors", "1", version, count, _] = first[..] else { return Err(format!("{dir}/vectors.txt: no index of schema 1")) };
        let (version, count) = (version.to_string(), size(count)?);
        let mut files = vec![];
        for i in 0..count {
            let words: Vec<&str> = lines.get(i + 1).map_or(vec![], |line| line.split(' ').collect());
            let ["file", number, bytes, sum, name] = words[..] else { return Err(format!("vectors.txt: line {} is no file", i + 2)) };
            if size(number)? != i || name.starts_with('/') || name.contains("..") {
                return Err(format!("vectors.txt, line {}: {name} is not file {i} of the pack", i + 2));
            }
            let data = read(dir, name)?;
            if data.len() != size(bytes)? {
                return Err(format!("{dir}/{name} has {} bytes, expected {bytes}", data.len()));
            }
            if sum != format!("{:016x}", checksum(&data)) {
                return Err(format!("{dir}/{name} is damaged: its checksum is another"));
            }
            files.push(data);
        }
        Ok(Pack { version, lines: lines[count + 1..].to_vec(), files })
    }

    /// The cases, one after the other.
    pub fn cases(&self) -> impl Iterator<Item = Result<Case<'_>, String>> + '_ {
        let starts: Vec<usize> = (0..self.lines.len()).filter(|&n| n == 0 || self.lines[n].starts_with("case ")).collect();
        let ends: Vec<usize> = starts.iter().skip(1).copied().chain([self.lines.len()]).collect();
        starts.into_iter().zip(ends).map(move |(start, end)| self.case(&self.lines[start..end]))
    }

    fn case(&self, lines: &[String]) -> Result<Case<'_>, String> {
        let mut c = Case { id: String::new(), operation: String::new(), arrays: vec![], words: vec![], outputs: vec![] };
        for line in lines {
            match line.split(' ').collect::<Vec<&str>>()[..] {
                ["case", id, operation] => (c.id, c.operation) = (id.into(), operation.into()),
                ["word", name, text] => c.words.push((name.into(), text.into())),
                ["out", name, rule] => c.outputs.push(Output { name: name.into(), rule: rule.into(), numbers: vec![] }),
                ["array", name, kind, file, offset, rank, ref shape @ ..] => c.arrays.push(self.array(name, kind, file, offset, rank, shape)?),
                _ => return Err(format!("vectors.txt: {line} is no line of a case")),
            }
        }
        for i in 0..c.outputs.len() {
            let count = c.check(&c.outputs[i]).ok_or(format!("case {}: output {} has not what its rule reads", c.id, c.outputs[i].name))?;
            c.outputs[i].numbers = vec![f32::NAN; count];
        }
        if c.outputs.is_empty() { Err(format!("case {} has no output", c.id)) } else { Ok(c) }
    }

    fn array(&self, name: &str, kind: &str, file: &str, offset: &str, rank: &str, shape: &[&str]) -> Result<Array<'_>, String> {
        let wrong = || format!("vectors.txt: {name} is no array in its file");
        let of_one = [("f64", 8), ("f32", 4), ("f16", 2), ("bf16", 2), ("i64", 8), ("i32", 4), ("i8", 1), ("u8", 1)];
        let bytes = of_one.iter().find(|k| k.0 == kind).ok_or_else(wrong)?.1;
        let (file, start) = (self.files.get(size(file)?).ok_or_else(wrong)?, size(offset)?);
        let shape = shape.iter().map(|n| size(n)).collect::<Result<Vec<usize>, String>>()?;
        let count = shape.iter().try_fold(1usize, |total, &n| total.checked_mul(n).filter(|&n| n > 0)).ok_or_else(wrong)?;
        let end = count.checked_mul(bytes).and_then(|length| start.checked_add(length)).ok_or_else(wrong)?;
        let data = file.get(start..end).ok_or_else(wrong)?;
        if size(rank)? == shape.len() && shape.len() <= 4 { Ok(Array { name: name.into(), kind: kind.into(), shape, data }) } else { Err(wrong()) }
    }
}

// --- judging ---

const TINY: f64 = 1.1754943508222875e-38;
const U: f64 = 5.9604644775390625e-08;

impl Case<'_> {
    /// The count of an output's numbers, if it has all that its rule reads.
    fn check(&self, o: &Output) -> Option<usize> {
        let (kind, arrays, numbers): (_, &[&str], &[&str]) = match o.rule.as_str() {
            "bounds" => ("f64", &["limit", "square"], &["shared"]),
            "equal" => ("f32", &[], &[]),
            "tensor" => ("f32", &["most"], &["mean"]),
            "logits" => ("f32", &["most"], &["mean", "scale", "single", "one_scale"]),
            _ => return None,
        };
        let part = |name: &str| self.get(&format!("{}.{name}", o.name)).ok();
        let value = part("value").filter(|a| a.kind == kind)?;
        let count = value.shape.iter().product::<usize>();
        let each = if kind == "f64" { count } else { *value.shape.first().unwrap_or(&1) };
        let fine = arrays.iter().all(|name| part(name).is_some_and(|a| a.kind == "f64" && a.data.len() == 8 * each))
            && numbers.iter().all(|name| part(name).is_some_and(|a| a.kind == "f64" && a.shape.is_empty()));
        fine.then_some(count)
    }

    fn part(&self, o: &Output, name: &str) -> Result<Vec<f64>, String> {
        self.f64(&format!("{}.{name}", o.name))
    }

    /// Judge all outputs: how near they are, or what is wrong.
    pub fn judge(&self) -> Result<String, String> {
        let mut text = String::new();
        for o in &self.outputs {
            let value = format!("{}.value", o.name);
            let width = o.numbers.len() / self.shape(&value)?.first().unwrap_or(&1);
            text = match o.rule.as_str() {
                "bounds" => self.bounds(o, &self.f64(&value)?, width)?,
                "equal" => equal(o, &self.f32(&value)?, width)?,
                _ => self.across(o, &self.f32(&value)?, width)?,
            };
        }
        Ok(text)
    }

    /// One operation: a limit for each number, one for the variance of all errors, and one for a common factor (judge/bounds.py, within).
    fn bounds(&self, o: &Output, value: &[f64], width: usize) -> Result<String, String> {
        let (limit, square, shared) = (self.part(o, "limit")?, self.part(o, "square")?, self.part(o, "shared")?[0]);
        let (mut count, mut squares, mut along, mut size, mut spread) = (0.0, 0.0, 0.0, 0.0, 0.0);
        let (mut at, mut worst, mut wrong) = (0, -1.0, 0);
        for i in (0..value.len()).filter(|&i| !limit[i].is_infinite()) {
            let off = o.numbers[i] as f64 - value[i];
            let share = if off.is_finite() { off.abs() / limit[i] } else { f64::INFINITY };
            wrong += !(share <= 1.0) as usize;
            if share > worst {
                (worst, at) = (share, i);
            }
            if square[i] > 0.0 && off.is_finite() {
                count += 1.0;
                squares += off * off / square[i];
                along += off * value[i];
                size += value[i] * value[i];
                spread += square[i] / 3.0 * value[i] * value[i];
            }
        }
        let (row, column, name, all) = (at / width, at % width, &o.name, value.len());
        let text = format!("{name}[{row}, {column}] is {}, expected {} +- {:.2e}: {worst:.3e} of the limit", o.numbers[at], value[at], limit[at]);
        if wrong > 0 {
            return Err(format!("{text}; {wrong} of {all} are wrong"));
        }
        if count > 0.0 && squares / count > 0.4 * (1.0 + 4.0 * (2.0 * shared / count).sqrt()) {
            return Err(format!("{name}: errors are small but everywhere: variance {:.2} of the bound's, expected at most 0.4", squares / count));
        }
        if size > 0.0 && (along / size).abs() > 6.0 * U + 4.0 * (spread * shared).sqrt() / size {
            return Err(format!("{name}: everything is {:.9} times what it should be", 1.0 + along / size));
        }
        Ok(text)
    }

    /// Tensors and logits of whole models: the mean square error of each row, over that of the row's own numbers, and their mean.
    fn across(&self, o: &Output, value: &[f32], width: usize) -> Result<String, String> {
        let (most, mean_limit, logits) = (self.part(o, "most")?, self.part(o, "mean")?[0], o.rule == "logits");
        let (mut mean, mut highest, mut beyond, mut wrong) = (0.0, 0.0f64, false, false);
        let (mut worst, mut share, mut more) = (0, -1.0, None);
        let rows = value.len() / width;
        for (t, (a, b)) in value.chunks(width).zip(o.numbers.chunks(width)).enumerate() {
            if let Some(i) = b.iter().position(|x| !x.is_finite()) {
                return Err(format!("{}[{t}, {i}] is {}", o.name, b[i]));
            }
            let centre = if logits { a.iter().map(|&x| x as f64).sum::<f64>() / width as f64 } else { 0.0 };
            let square: f64 = a.iter().zip(b).map(|(&x, &y)| (y as f64 - x as f64).powi(2)).sum();
            let size: f64 = a.iter().map(|&x| (x as f64 - centre).powi(2)).sum();
            let alike = if square > 0.0 { 1e300 } else { 0.0 };
            let nmse = if logits && size <= 0.0 { alike } else { square / size.max(TINY) };
            mean += nmse / rows as f64;
            highest = highest.max(nmse);
            wrong |= !(nmse <= most[t]);
            if nmse / most[t] > share {
                (share, worst) = (nmse / most[t], t);
            }
            if logits {
                more = more.or(self.row_of_logits(o, a, b, &mut beyond)?.map(|what| format!("{}, row {t}: {what}", o.name)));
            }
        }
        let text = format!("{}, row {worst}: mean square error {share:.3} of the limit {:.2e}; on average {mean:.2e}, limit {mean_limit:.2e}", o.name, most[worst]);
        if if logits { !beyond } else { highest <= 1e-9 } {
            return Ok(text);
        }
        if wrong || mean > mean_limit { Err(text) } else { more.map_or(Ok(text), Err) }
    }

    /// What a row of logits adds (judge/measures.py, _numbers and _beyond_rounding): a factor, single logits, a factor and a constant alone.
    fn row_of_logits(&self, o: &Output, a: &[f32], b: &[f32], beyond: &mut bool) -> Result<Option<&'static str>, String> {
        let n = a.len() as f64;
        let mean = a.iter().map(|&x| x as f64).sum::<f64>() / n;
        let error: Vec<f64> = a.iter().zip(b).map(|(&x, &y)| y as f64 - x as f64).collect();
        let centred: Vec<f64> = a.iter().map(|&x| x as f64 - mean).collect();
        let average = |x: &mut dyn Iterator<Item = f64>| x.sum::<f64>() / n;
        let variance = average(&mut centred.iter().map(|x| x * x));
        let along = average(&mut centred.iter().zip(b).map(|(x, &y)| x * y as f64));
        let (shift, square) = (average(&mut error.iter().copied()), average(&mut error.iter().map(|x| x * x)));
        let mut sorted: Vec<f64> = error.iter().map(|x| x.abs()).collect();
        sorted.sort_by(f64::total_cmp);
        let (largest, typical) = (sorted[a.len() - 1], (sorted[(a.len() - 1) / 2] + sorted[a.len() / 2]) / 2.0);
        let (spread, scale) = (variance.sqrt(), if variance > 0.0 { along / variance } else { 1.0 });
        let (single, fit) = (self.part(o, "single")?[0], |(e, c): (&f64, &f64)| (e - shift - (scale - 1.0) * c).powi(2));
        let left = average(&mut error.iter().zip(&centred).map(fit));
        let allowed = |c: f64| if typical <= 1e-5 * spread { 1e-4 * spread.max(c) } else { single * spread + c / 10.0 };
        let outlier = error.iter().zip(&centred).any(|(e, c)| e.abs() > allowed(c.abs()).max(1e-300));
        let is_beyond = largest > 1e-4 * spread;
        *beyond |= is_beyond;
        let fitted = is_beyond && square > 0.0 && left / square < 0.01 && self.part(o, "one_scale")?[0] == 0.0;
        Ok(if (scale - 1.0).abs() > self.part(o, "scale")?[0] {
            Some("all logits are a factor off")
        } else if a.len() >= 32 && outlier {
            Some("a single logit is far off")
        } else {
            (a.len() >= 32 && fitted).then_some("only a factor and a constant are wrong")
        })
    }
}

fn equal(o: &Output, value: &[f32], width: usize) -> Result<String, String> {
    let same = |i: &usize| o.numbers[*i] == value[*i] || (o.numbers[*i].is_nan() && value[*i].is_nan());
    match (0..value.len()).find(|i| !same(i)) {
        Some(i) => Err(format!("{}[{}, {}] is {}, expected exactly {}", o.name, i / width, i % width, o.numbers[i], value[i])),
        None => Ok(format!("{}: the same numbers", o.name)),
    }
}

/// Run an engine on the cases whose ids begin with `only`, and print TAP, and JUnit's XML if there is a file for it. The engine gives
/// Ok(true) for a case that it has done, Ok(false) for one that it does not support. Returns the number of cases that failed; an error
/// if the pack cannot be read, or no case ran, which is no pass.
pub fn run(
    dir: &str,
    only: &str,
    mut engine: impl FnMut(&mut Case) -> Result<bool, String>,
    tap: &mut dyn Write,
    mut junit: Option<&mut dyn Write>,
) -> Result<usize, String> {
    let said = |error: std::io::Error| error.to_string();
    let result = (|| {
        let pack = Pack::open(dir)?;
        writeln!(tap, "TAP version 13\n# pack {}", pack.version).map_err(said)?;
        if let Some(file) = junit.as_mut() {
            writeln!(file, "<?xml version=\"1.0\"?>\n<testsuite name=\"vectors {}\">", pack.version).map_err(said)?;
        }
        let (mut n, mut ran, mut failed) = (0, 0, 0);
        for case in pack.cases() {
            let mut c = case?;
            if !c.id.starts_with(only) {
                continue;
            }
            let outcome = engine(&mut c).and_then(|done| if done { c.judge().map(Some) } else { Ok(None) });
            n += 1;
            ran += !matches!(outcome, Ok(None)) as usize;
            failed += outcome.is_err() as usize;
            let (line, xml) = match &outcome {
                Ok(Some(text)) => (format!("ok {n} - {} # {text}", c.id), String::new()),
                Ok(None) => (format!("ok {n} - {} # SKIP not supported", c.id), "<skipped/>".into()),
                Err(why) => (format!("not ok {n} - {}\n  # {why}", c.id), format!("<failure message=\"{}\"/>", why.replace(['<', '&', '"'], "?"))),
            };
            writeln!(tap, "{line}").map_err(said)?;
            if let Some(file) = junit.as_mut() {
                writeln!(file, "<testcase classname=\"{}\" name=\"{}\">{xml}</testcase>", c.operation, c.id).map_err(said)?;
            }
        }
        if ran == 0 {
            return Err("no case ran".to_string());
        }
        writeln!(tap, "1..{n}\n# {failed} of {ran} failed, {} skipped", n - ran).map_err(said)?;
        if let Some(file) = junit.as_mut() {
            writeln!(file, "</testsuite>").map_err(said)?;
        }
        Ok(failed)
    })();
    if let Err(error) = &result {
        writeln!(tap, "Bail out! {error}").map_err(said)?;
    }
    result
}

//! A small engine's operations under test vectors. With an argument the engine has a bug: the quantiser truncates.
//!
//! bitnet-np vectors vectors --size small
//! cp vectors/vectors.rs . && rustc --edition 2021 -O engine.rs && ./engine
mod vectors;

use vectors::Case;

/// Codes of each row, and 127 / its largest magnitude.
fn quantize(x: &[f32], width: usize, truncates: bool) -> (Vec<f32>, Vec<f32>) {
    let (mut codes, mut scales) = (vec![], vec![]);
    for row in x.chunks(width) {
        let largest = row.iter().fold(1e-5f32, |most, x| most.max(x.abs()));
        let finite = row.iter().all(|x| x.is_finite());
        let scale = if finite { 127.0 / largest } else { f32::NAN };
        let rounded = |x: f32| if truncates { x.trunc() } else { x.round_ties_even() };
        codes.extend(row.iter().map(|x| if finite { rounded(x * scale) } else { 0.0 }));
        scales.push(scale);
    }
    (codes, scales)
}

fn ternary_matmul(c: &Case, truncates: bool) -> Result<Vec<f32>, String> {
    let (w, width) = (c.get("w")?, c.shape("x")?[1]);
    let (codes, scales) = quantize(&c.f32("x")?, width, truncates);
    let w_scale = c.num("w_scale", 1.0) as f32;
    let dot = |row: &[f32], w: &[u8]| row.iter().zip(w).map(|(&q, &w)| q as i32 * w as i8 as i32).sum::<i32>();
    let of_row = |(row, scale): (&[f32], &f32)| w.data.chunks(width).map(|w| dot(row, w) as f32 / scale * w_scale).collect::<Vec<_>>();
    Ok(codes.chunks(width).zip(&scales).flat_map(of_row).collect())
}

fn main() {
    let truncates = std::env::args().count() > 1;
    let engine = |c: &mut Case| match c.operation.as_str() {
        "quantize" => {
            let (codes, scales) = quantize(&c.f32("x")?, c.shape("x")?[1], truncates);
            c.set("codes", codes)?;
            c.set("scale", scales)
        }
        "ternary_matmul" if c.get("w")?.kind == "i8" => {
            let y = ternary_matmul(c, truncates)?;
            c.set("y", y)
        }
        _ => Ok(false),
    };
    std::process::exit(vectors::run("vectors", "", engine, &mut std::io::stdout(), None).map_or(2, |failed| (failed > 0) as i32));
}

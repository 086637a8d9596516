//! Writes tensors as .npy files that `bitnet-np check` reads. Copy this file into your engine as a module; it needs no crate.
//!
//! `dump(&format!("attn_norm-{layer}"), &[tokens, width], &x)?` writes dump/attn_norm-3.npy. While tokens are decoded, give the rows of
//! each call the number of its step: `dump(&format!("attn_norm-{layer}.step-{step}"), &[1, width], &x)?`.

/// Writes dump/<name>.npy: float32, row by row.
pub fn dump(name: &str, shape: &[usize], x: &[f32]) -> std::io::Result<()> {
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape:?}}}").replace('[', "(").replace(']', ",)");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(x.iter().flat_map(|v| v.to_le_bytes()));
    std::fs::create_dir_all("dump")?;
    std::fs::write(format!("dump/{name}.npy"), file)
}

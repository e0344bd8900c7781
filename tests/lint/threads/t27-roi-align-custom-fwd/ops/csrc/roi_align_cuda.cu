#include <ATen/cuda/CUDAContext.h>
#include <torch/extension.h>

template <typename T>
__device__ float bilinear(const T* in, int h, int w, float y, float x) {
  if (y < -1.f || y > h || x < -1.f || x > w) return 0.f;
  y = fmaxf(y, 0.f); x = fmaxf(x, 0.f);
  int y0 = min((int)y, h - 1), x0 = min((int)x, w - 1), y1 = min(y0 + 1, h - 1), x1 = min(x0 + 1, w - 1);
  float ly = y - y0, lx = x - x0;
  return (1 - ly) * (1 - lx) * (float)in[y0 * w + x0] + (1 - ly) * lx * (float)in[y0 * w + x1] +
         ly * (1 - lx) * (float)in[y1 * w + x0] + ly * lx * (float)in[y1 * w + x1];
}

template <typename T>
__global__ void forward_kernel(int n, const T* input, const T* rois, T* output, int c, int h, int w, int ah, int aw, float scale, bool aligned) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) {
    int pw = i % aw, ph = i / aw % ah, ch = i / aw / ah % c, r = i / aw / ah / c;
    const T* roi = rois + r * 5;
    float off = aligned ? .5f : 0.f, x1 = (float)roi[1] * scale - off, y1 = (float)roi[2] * scale - off;
    float bw = ((float)roi[3] * scale - off - x1) / aw, bh = ((float)roi[4] * scale - off - y1) / ah;
    output[i] = (T)bilinear(input + ((int)(float)roi[0] * c + ch) * h * w, h, w, y1 + (ph + .5f) * bh, x1 + (pw + .5f) * bw);
  }
}

void roi_align_forward_cuda(torch::Tensor input, torch::Tensor rois, torch::Tensor output, torch::Tensor, torch::Tensor,
                            int ah, int aw, float scale, int, int, bool aligned) {
  int n = output.numel();
  AT_DISPATCH_FLOATING_TYPES_AND_HALF(input.scalar_type(), "roi_align_forward", [&] {
    forward_kernel<scalar_t><<<(n + 511) / 512, 512, 0, at::cuda::getCurrentCUDAStream()>>>(
        n, input.data_ptr<scalar_t>(), rois.data_ptr<scalar_t>(), output.data_ptr<scalar_t>(), input.size(1), input.size(2), input.size(3), ah, aw, scale, aligned);
  });
}

template <typename T>
__global__ void backward_kernel(int n, const T* grad, const T* rois, T* gin, int c, int h, int w, int ah, int aw, float scale, bool aligned) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) {
    int pw = i % aw, ph = i / aw % ah, ch = i / aw / ah % c, r = i / aw / ah / c;
    const T* roi = rois + r * 5;
    float off = aligned ? .5f : 0.f, x1 = (float)roi[1] * scale - off, y1 = (float)roi[2] * scale - off;
    float bw = ((float)roi[3] * scale - off - x1) / aw, bh = ((float)roi[4] * scale - off - y1) / ah;
    int y = min(max((int)(y1 + (ph + .5f) * bh), 0), h - 1), x = min(max((int)(x1 + (pw + .5f) * bw), 0), w - 1);
    atomicAdd(gin + (((int)(float)roi[0] * c + ch) * h + y) * w + x, grad[i]);
  }
}

void roi_align_backward_cuda(torch::Tensor grad_output, torch::Tensor rois, torch::Tensor, torch::Tensor,
                             torch::Tensor grad_input, int ah, int aw, float scale, int, int, bool aligned) {
  int n = grad_output.numel();
  AT_DISPATCH_FLOATING_TYPES(grad_output.scalar_type(), "roi_align_backward", [&] {
    backward_kernel<scalar_t><<<(n + 511) / 512, 512, 0, at::cuda::getCurrentCUDAStream()>>>(
        n, grad_output.data_ptr<scalar_t>(), rois.data_ptr<scalar_t>(), grad_input.data_ptr<scalar_t>(), grad_input.size(1), grad_input.size(2), grad_input.size(3), ah, aw, scale, aligned);
  });
}
